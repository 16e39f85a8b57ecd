"""A trace and its requests, the limits of their numbers, and the error of a trace that cannot be read."""

from __future__ import annotations

from dataclasses import dataclass

from attncore.quoted import quoted

HASH_BLOCK = 512  # prompt tokens that one hash id of a trace stands for
MAX_TOKENS = 2**31 - 1  # sequence lengths are int32 in the metadata
MAX_HASH_ID = 2**62 - 1  # content ids are int64, two for each number: one a hash id, one a request


class TraceError(ValueError):
    """A trace that cannot be read; the text is one line naming the file, the row, the field and the limit."""


@dataclass(frozen=True, slots=True)
class Request:
    """One request of a trace.

    ``row`` is 1 for the first request of the file. ``arrival`` is in seconds after the first request.
    ``hash_ids`` has one id for each ``HASH_BLOCK`` prompt tokens, the last one possibly partial; an id stands for its
    tokens together with everything before them. None: the trace does not say what the prompt shares with others.
    """

    row: int
    arrival: float
    prompt_tokens: int
    output_tokens: int
    hash_ids: tuple[int, ...] | None = None


@dataclass(frozen=True)
class Trace:
    """Requests in order of arrival, with where they come from (``source``: a file name or a workload's name).

    ``doubt`` says why the last of them may not be as it was written, empty where nothing tells of it.
    """

    source: str
    format: str
    requests: tuple[Request, ...]
    doubt: str = ""


def checked_length(name: str, value: int) -> int:
    """``value``, a number of tokens, or a ValueError that begins with the field's name."""
    if not 1 <= value <= MAX_TOKENS:
        raise ValueError(f"{name}: {quoted(value)} is not between 1 and {MAX_TOKENS}")
    return value


def checked_total(prompt_name: str, prompt: int, output_name: str, output: int) -> None:
    """A ValueError where prompt and output together do not fit a sequence length."""
    if prompt + output > MAX_TOKENS:
        raise ValueError(f"{output_name}: {output} and {prompt_name} {prompt} are more than {MAX_TOKENS} together")
