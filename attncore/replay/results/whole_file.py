"""A file that a replay writes: there when all is written, or not at all."""

from __future__ import annotations

import errno
import io
import os
import secrets
import sys
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Self, TextIO

from attncore.same_readers import same_readers
from attncore.standard_output import copied_descriptor, named_descriptor, waiting_file

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import TracebackType


class WholeFile:
    """``with WholeFile(path) as file: file.write(text)``.

    The file appears under its name, and replaces one of that name, only when all is written and nothing went wrong;
    until then it has a name of its own beside it, which is removed whatever ends the block. A pipe, a device or a
    descriptor of this process (``/dev/fd/3``) is written to directly. Raises OSError, naming the path, where it
    cannot be written.
    """

    def __init__(self, path: str | Path) -> None:
        self._given = path
        self._descriptor = named_descriptor(path)
        with self._named_errors():  # a relative one, of a folder that has been deleted
            self._path = Path(os.path.realpath(path))  # the whole of it, but for a link that leads to itself
            if os.path.basename(path) in ("", "."):  # what realpath leaves out, "steps.jsonl/" is of a folder
                raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
            if self._path.is_symlink() and self._descriptor is None:
                raise OSError(errno.ELOOP, os.strerror(errno.ELOOP))
            special = self._path.exists() and not self._path.is_file()
            self._direct = special or self._descriptor is not None
        # Random, and never an existing file: others may write to this folder.
        # The bytes of a name are counted, 255 at most; of its last letter there may be a part.
        name = os.fsencode(self._path.name)[:100].decode(sys.getfilesystemencoding(), "ignore")
        beside = self._path.with_name(f".{name}.{secrets.token_hex(6)}.partial")
        self._partial = self._path if self._direct else beside
        self._file: TextIO | None = None

    def open(self) -> None:
        """What ``with`` does at its beginning."""
        with self._named_errors():
            if self._descriptor is not None:  # by its number: a name would be of another file, or of none
                self._file = _text_file(self._descriptor)
                return
            if self._path.is_dir():
                raise IsADirectoryError("is a directory, a file is needed")
            if self._direct or not self._path.exists():
                with self._partial.open("w" if self._direct else "x") as file:
                    self._file = _text_file(file.fileno())
                return
            # What only some may read stays so, from the first moment on.
            with os.fdopen(os.open(self._partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
                self._file = _text_file(file.fileno())
            os.fchmod(self._file.fileno(), same_readers(self._file.fileno(), self._path))

    def write(self, text: str) -> None:
        if self._file is None:
            raise ValueError("record: not open; use it inside its with block")
        with self._named_errors():
            self._file.write(text)

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
                # What was not opened is not there, and why is told already.
                with suppress(OSError if self._file is None else FileNotFoundError):
                    self._partial.unlink()

    @contextmanager
    def _named_errors(self) -> Iterator[None]:
        """Errors of a file that is already open do not say which one: a full disk is just a full disk."""
        try:
            yield
        except OSError as error:
            raise OSError(f"{self._given} cannot be written: {error.strerror or error}") from error


def _text_file(descriptor: int) -> TextIO:
    """The file of a descriptor, by another one, which is out of reach of plugins that close those of others."""
    return io.TextIOWrapper(waiting_file(copied_descriptor(descriptor)), encoding="utf-8")
