"""Reads a trace file: which format it has is told by its content, gzip by its first bytes.

It is read as a stream, so that a pipe will do, and what is taken of it is limited: a file of some megabytes may unpack
to any number of them.
"""

from __future__ import annotations

import gzip
import math
import zlib
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

from attncore.input_files import GZIP, bounded_lines, standard_input
from attncore.quoted import quoted
from attncore.replay.traces import azure, mooncake
from attncore.replay.traces.trace import Request, Trace, TraceError
from attncore.show import counted

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import ModuleType
    from typing import BinaryIO

    from attncore.input_files import Readable

MAX_LINE = 2**22
"""Bytes of a line: it has an id of some digits for each 512 tokens of a prompt."""
MAX_BYTES = 2**33
"""Bytes of a trace, unpacked; a week of a busy service has one or two 2**30."""
MAX_RATIO, MAX_SMALL = 100, 2**24
"""A gzipped trace unpacks to at most so many times its size, or so many bytes: traces unpack to less than 10 times
theirs, and gzip can pack 1000 times as much, so that a small file would take hours."""
MAX_NOTHING = 2**23
"""Bytes of a gzipped trace that may unpack to nothing, beyond twice what was unpacked: names in headers, parts without
data, and zeros behind the last part, of which a file may hold any number, in no place of the disk."""
MAX_REQUESTS = 10**6
"""Requests that are kept where the number of requests is not limited."""
MAX_HASH_IDS = 2 * 10**7
"""Hash ids of all requests that are kept: some 10**10 tokens of prompts, and a gigabyte of memory."""

_FORMATS: dict[str, ModuleType] = {"azure": azure, "mooncake": mooncake}


def read_trace(path: str | Path, max_requests: int | None = None, max_seconds: float = math.inf) -> Trace:
    """The first ``max_requests`` requests of a file that arrive in its first ``max_seconds`` seconds.

    The whole file is checked, also behind the last request kept: a broken file is refused, not half used. Without
    ``max_requests`` at most MAX_REQUESTS may remain. ``-`` is standard input.

    Raises:
        TraceError: the file is missing, empty, cut, of an unknown format, has a bad row, or is beyond a limit; one line
            that names the file, the row (1 is the first request) and line, the field and the limit.
    """
    name = "standard input" if path == "-" else str(path)
    try:
        with nullcontext(standard_input()) if path == "-" else open(path, "rb") as raw:
            start = raw.peek(1)[:1]  # a pipe cannot be rewound, and may have no second byte yet
            if not start:  # reading on, a terminal would wait for a second Ctrl-D
                return _read(_Lines(iter(())), name, max_requests, max_seconds)
            if start != GZIP[:1]:  # which no text begins with
                return _read(_Lines(_text(name, raw, None)), name, max_requests, max_seconds)
            packed = _Counted(name, raw)
            with gzip.open(packed) as data:  # type: ignore[call-overload]
                return _read(_Lines(_text(name, data, packed), whole=True), name, max_requests, max_seconds)
    except OSError as error:
        # gzip reports a bad header or checksum as OSError without errno; the system's have one.
        reason = f" cannot be read: {error.strerror}" if error.strerror else f": broken gzip data ({error})"
        raise TraceError(f"{name}{reason}") from error
    except (EOFError, zlib.error) as error:
        raise TraceError(f"{name}: the gzip data are cut or broken ({error}); fetch the file again") from error
    except UnicodeDecodeError as error:
        raise TraceError(f"{name}: not a text file: byte {error.object[error.start]:#04x} is not UTF-8") from error


class _Counted:
    """A binary stream, of which ``count`` bytes have been read, and unpacked to ``unpacked`` bytes."""

    def __init__(self, path: str, stream: BinaryIO) -> None:
        self._path, self._stream, self.count, self.unpacked = path, stream, 0, 0

    def read(self, size: int = -1) -> bytes:
        """The next ``size`` bytes; TraceError where too many have unpacked to nothing."""
        data = self._stream.read(size)
        self.count += len(data)
        if self.count > MAX_NOTHING + 2 * self.unpacked:
            raise TraceError(
                f"{self._path}: its first {self.count} bytes unpack to {self.unpacked} bytes, which no trace does; "
                "fetch the file again"
            )
        return data


class _Lines:
    """Lines without their ends; ``has_end`` of the last one that was taken, which only a file's last line has not.

    ``whole``: they are known to be all, as gzip's checksum says.
    """

    def __init__(self, lines: Iterator[str], *, whole: bool = False) -> None:
        self._lines, self.has_end, self.whole = lines, True, whole

    def __iter__(self) -> _Lines:
        return self

    def __next__(self) -> str:
        line = next(self._lines)
        self.has_end = line.endswith("\n")
        return line.rstrip("\r\n")


def _read(lines: _Lines, path: str, max_requests: int | None, max_seconds: float) -> Trace:
    first_line = next(lines, None)
    if first_line is None:
        raise TraceError(f"{path}: the file is empty; an Azure CSV or a Mooncake JSONL trace is expected")
    name = next((name for name, reader in _FORMATS.items() if reader.recognises(first_line)), None)
    if name is None:
        raise TraceError(
            f"{path}: unknown format: line 1 is {quoted(first_line[:60])}, neither the header "
            f"{','.join(azure.COLUMNS)} of an Azure CSV nor a JSON object with {', '.join(mooncake.FIELDS)}"
        )
    reader = _FORMATS[name]
    header_lines = 1 if reader is azure else 0
    requests: list[Request] = []
    rows = num_ids = 0
    requests_read = reader.rows(lines if header_lines else _chain(first_line, lines))
    for request in _located(path, requests_read, lines, header_lines):
        rows += 1
        if (max_requests is None or len(requests) < max_requests) and request.arrival < max_seconds:
            requests.append(request)
            num_ids += len(request.hash_ids or ())
            _check_totals(path, len(requests), num_ids, max_requests)
    if not rows:
        raise TraceError(f"{path}: the file holds a header and no requests")
    doubt = ""
    if header_lines and not (lines.has_end or lines.whole) and requests and requests[-1].row == rows:
        doubt = (
            f"{path}: row {rows} (line {rows + 1}), the last, has no line end: the file may be cut, and its "
            f"{azure.COLUMNS[-1]}, {requests[-1].output_tokens}, be the beginning of a number"
        )
    return Trace(path, name, tuple(requests), doubt)


def _text(path: str, data: Readable, packed: _Counted | None) -> Iterator[str]:
    """The lines of a trace with their ends, and without a byte order mark; ``packed`` is what is unpacked."""
    number = read = 0
    try:
        for number, line in enumerate(bounded_lines(data, MAX_LINE), 1):
            read += len(line)
            if read > MAX_BYTES:
                raise TraceError(f"{path}: longer than {MAX_BYTES} bytes, unpacked")
            if packed is not None:
                packed.unpacked = read
            if packed is not None and read > max(MAX_SMALL, MAX_RATIO * packed.count):
                raise TraceError(
                    f"{path}: its first {counted(packed.count, 'byte')} unpack to more than {MAX_SMALL} bytes and to "
                    f"more than {MAX_RATIO} times as many, which no trace does; if it is one, give it unpacked"
                )
            yield line.decode("utf-8-sig" if number == 1 else "utf-8")
    except (TraceError, UnicodeDecodeError):
        raise
    except ValueError as error:
        raise TraceError(f"{path}: line {number + 1}: {error}") from None


def _check_totals(path: str, num_requests: int, num_ids: int, max_requests: int | None) -> None:
    if max_requests is None and num_requests > MAX_REQUESTS:
        raise TraceError(f"{path}: more than {MAX_REQUESTS} requests; say how many with --requests, or give --minutes")
    if num_ids > MAX_HASH_IDS:
        raise TraceError(f"{path}: hash_ids: more than {MAX_HASH_IDS} in all; replay fewer requests with --requests")


def _chain(first: str, rest: Iterator[str]) -> Iterator[str]:
    yield first
    yield from rest


def _located(path: str, requests: Iterator[Request], lines: _Lines, header_lines: int) -> Iterator[Request]:
    """The requests that are read of ``lines``, the reader's complaints completed with file, row and line."""
    row = 0
    while True:
        row += 1
        try:
            request = next(requests)
        except StopIteration:
            return
        except (UnicodeDecodeError, TraceError):
            raise
        except ValueError as error:
            if not header_lines:  # a line of JSON says itself that it is cut
                raise TraceError(f"{path}: row {row}: {error}") from None
            cut = "" if lines.has_end else "; it is the last line and has no line end: the file may be cut"
            raise TraceError(f"{path}: row {row} (line {row + header_lines}): {error}{cut}") from None
        yield request
