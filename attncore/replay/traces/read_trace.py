"""Reads a trace file: which format it has is told by its content, gzip by its first bytes."""

from __future__ import annotations

import gzip
import io
import math
import zlib
from pathlib import Path
from typing import TYPE_CHECKING

from attncore.replay.traces import azure, mooncake
from attncore.replay.traces.trace import Request, Trace, TraceError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import ModuleType

_GZIP = b"\x1f\x8b"
_FORMATS: dict[str, ModuleType] = {"azure": azure, "mooncake": mooncake}


def read_trace(path: str | Path, max_requests: int | None = None, max_seconds: float = math.inf) -> Trace:
    """The first ``max_requests`` requests of a file that arrive in its first ``max_seconds`` seconds.

    The whole file is checked, also behind the last request kept: a broken file is refused, not half used.

    Raises:
        TraceError: the file is missing, empty, cut, of an unknown format, or has a bad row; one line that names the
            file, the row (1 is the first request) and line, the field and the limit.
    """
    try:
        with Path(path).open("rb") as raw:
            magic = raw.read(2)
            raw.seek(0)
            with gzip.open(raw) if magic == _GZIP else raw as data:
                text = io.TextIOWrapper(data, encoding="utf-8-sig", newline="")
                return _read(str(path), text, max_requests, max_seconds)
    except OSError as error:
        # gzip reports a bad header or checksum as OSError without errno; the system's have one.
        reason = error.strerror or f"broken gzip data ({error})"
        raise TraceError(f"{path}: {reason}") from error
    except (EOFError, zlib.error) as error:
        raise TraceError(f"{path}: the gzip data are cut or broken ({error}); fetch the file again") from error
    except UnicodeDecodeError as error:
        raise TraceError(f"{path}: not a text file: byte {error.object[error.start]:#04x} is not UTF-8") from error


def _read(path: str, text: io.TextIOBase, max_requests: int | None, max_seconds: float) -> Trace:
    lines = (line.rstrip("\r\n") for line in text)
    first_line = next(lines, None)
    if first_line is None:
        raise TraceError(f"{path}: the file is empty; an Azure CSV or a Mooncake JSONL trace is expected")
    name = next((name for name, reader in _FORMATS.items() if reader.recognises(first_line)), None)
    if name is None:
        raise TraceError(
            f"{path}: unknown format: line 1 is {first_line[:60]!r}, neither the header {','.join(azure.COLUMNS)} "
            f"of an Azure CSV nor a JSON object with {', '.join(mooncake.FIELDS)}"
        )
    reader = _FORMATS[name]
    header_lines = 1 if reader is azure else 0
    requests: list[Request] = []
    rows = 0
    for request in _located(path, reader, lines if header_lines else _chain(first_line, lines), header_lines):
        rows += 1
        if (max_requests is None or len(requests) < max_requests) and request.arrival < max_seconds:
            requests.append(request)
    if not rows:
        raise TraceError(f"{path}: the file holds a header and no requests")
    return Trace(path, name, tuple(requests))


def _chain(first: str, rest: Iterator[str]) -> Iterator[str]:
    yield first
    yield from rest


def _located(path: str, reader: ModuleType, lines: Iterator[str], header_lines: int) -> Iterator[Request]:
    """The reader's requests, its complaints completed with file, row and line."""
    row = 0
    requests: Iterator[Request] = reader.rows(lines)
    while True:
        row += 1
        try:
            request = next(requests)
        except StopIteration:
            return
        except UnicodeDecodeError:
            raise
        except ValueError as error:
            line = f" (line {row + header_lines})" if header_lines else ""
            raise TraceError(f"{path}: row {row}{line}: {error}") from None
        yield request
