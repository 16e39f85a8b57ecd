"""Records the batches of a replay as a batch file: JSON Lines that ``attncore build`` reads."""

from __future__ import annotations

import json
import secrets
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, TextIO

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from types import TracebackType

    from attncore.builder.persistent.kv_cache_group import KVCacheGroup
    from attncore.replay.scheduling.running_request import RunningRequest
    from attncore.replay.scheduling.step import Step


class StepsFile:
    """``with StepsFile(path, block_size) as record: record(step)``. ``line`` makes what a line holds of a step.

    The file appears under its name, and replaces one of that name, only when all is written and nothing went wrong;
    until then it has a name of its own beside it, which is removed whatever ends the block. A pipe or a device is
    written to directly. Raises OSError, naming the path, where it cannot be written.
    """

    def __init__(
        self, path: str | Path, block_size: int, line: Callable[[Step, int], dict[str, Any]] | None = None
    ) -> None:
        self.block_size = block_size
        self._line = line or batch_line
        self._given = path
        with self._named_errors():  # a relative one, of a folder that has been deleted
            self._path = Path(path).resolve()
            self._direct = self._path.exists() and not self._path.is_file()
        # Random, and never an existing file: others may write to this folder.
        beside = self._path.with_name(f".{self._path.name[:100]}.{secrets.token_hex(6)}.partial")
        self._partial = self._path if self._direct else beside
        self._file: TextIO | None = None

    def open(self) -> None:
        """What ``with`` does at its beginning."""
        with self._named_errors():
            if self._path.is_dir():
                raise IsADirectoryError("is a directory, a file is needed")
            self._file = self._partial.open("w" if self._direct else "x", encoding="utf-8")

    def __call__(self, step: Step) -> None:
        """One line for a step, whose requests stand as before it."""
        if self._file is None:
            raise ValueError("record: not open; use it inside its with block")
        line = json.dumps(self._line(step, self.block_size), separators=(",", ":"))
        with self._named_errors():
            self._file.write(line + "\n")

    def __enter__(self) -> Self:
        self.open()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        try:
            # After a failure the file is removed, so it does not matter what cannot be flushed into it.
            with self._named_errors() if kind is None else suppress(OSError):
                if self._file is not None:
                    self._file.close()
            if kind is None and not self._direct:
                with self._named_errors():
                    self._partial.replace(self._path)
        finally:
            if not self._direct:
                with suppress(FileNotFoundError):
                    self._partial.unlink()

    @contextmanager
    def _named_errors(self) -> Iterator[None]:
        """Errors of a file that is already open do not say which one: a full disk is just a full disk."""
        try:
            yield
        except OSError as error:
            raise OSError(f"{self._given} cannot be written: {error.strerror or error}") from error


def batch_line(step: Step, block_size: int) -> dict[str, Any]:
    """A step in the words of the batch file: prompts first, one group a request."""
    prompts = [_group(running, count, is_prompt=True) for running, count in step.prefills]
    decodes = [_group(running, 1, is_prompt=False) for running in step.decodes]
    chunked = any(running.computed for running, _ in step.prefills)
    return {"block_size": block_size, "chunked_prefill": chunked, "groups": prompts + decodes}


def _group(running: RunningRequest, query_len: int, *, is_prompt: bool) -> dict[str, Any]:
    sequence = {
        "seq_id": running.row,
        "query_len": query_len,
        "context_len": running.computed,
        "block_table": running.blocks,
    }
    return {"is_prompt": is_prompt, "sequences": [sequence]}


def persistent_line(step: Step, block_size: int, groups: Sequence[KVCacheGroup] | None = None) -> dict[str, Any]:
    """A step in the words of the batch file of ``attncore build --groups``, ``--speculative``, ``--context-parallel``.

    One sequence a request, decodes first; tables by name where there are ``groups``.
    """
    query_lens = [(running, 1 + step.draft(running).drafted) for running in step.decodes] + step.prefills
    sequences = []
    for running, query_len in query_lens:
        sequence: dict[str, Any] = {"seq_id": running.row, "query_len": query_len, "context_len": running.computed}
        if groups is None:
            sequences.append(sequence | {"block_table": running.blocks})
        else:
            tables = {group.name: blocks for group, blocks in zip(groups, running.tables, strict=True)}
            sequences.append(sequence | {"block_tables": tables})
    return {"sequences": sequences} if groups else {"block_size": block_size, "sequences": sequences}
