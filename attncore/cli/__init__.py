"""The command line. Each command is the module of its name, imported only when it runs.

A command's module has ``configure(parser)`` and ``run(args) -> int``; its docstring is the command's description. Exit
codes: 0 success, 1 a finding, 2 bad usage or input (one line on standard error), 3 no usable backend, 130 interrupted,
141 the pipe that it writes to is read no more (silently), 143 terminated.

- ``replay``, ``build``, ``list``, ``explain``, ``doctor``, ``verify``, ``bench``, ``new_backend``: the commands.
- ``replay_options``: the options of ``replay``; ``persistent_builder_options``: those it shares with ``build``.
- ``argument_types``: types for argparse; ``usage_errors``: mistakes of a user.
- ``output``, ``progress_bar``: JSON, tables, a bar.
- ``streams_and_signals``: closed pipes, full disks, signals.
"""

from __future__ import annotations

import argparse
import contextlib
import difflib
import errno
import importlib
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, NoReturn

from attncore._version import __version__
from attncore.cli.output import only_json
from attncore.cli.streams_and_signals import READER_GONE, Terminated, prepared, settle
from attncore.cli.usage_errors import InputLineError, UsageError
from attncore.errors import AttncoreError, NoBackendError
from attncore.quoted import one_line, quoted
from attncore.standard_output import own_streams

if TYPE_CHECKING:
    from _typeshed import SupportsWrite

COMMANDS = {
    "replay": "replay a request trace: scheduling, paged cache, metadata and attention, verified",
    "build": "read batches (JSON Lines), write their metadata",
    "list": "list the attention backends that are installed",
    "explain": "say which backend would be chosen, on this machine or another, and why not the others",
    "doctor": "check the installation: versions, environment, each plugin in a child process",
    "verify": "compare a backend with the reference on this machine, in a child process",
    "bench": "time a backend's steps beside the reference, and compare them with saved runs",
    "new-backend": "write the repository of a new backend, which works and is there to be changed",
}


class _Parser(argparse.ArgumentParser):
    """argparse without the usage text before an error: one line says it."""

    def error(self, message: str) -> NoReturn:
        name, unknown, words = message.partition("unrecognized arguments: ")
        if unknown and not name:
            option = words.split(maxsplit=1)[0].partition("=")[0]
            near = difflib.get_close_matches(option, self._option_string_actions, 1)
            message += f"; did you mean {near[0]}?" if near else f"; {self.prog} --help lists the options"
        raise UsageError(message)

    def _print_message(self, message: str, file: SupportsWrite[str] | None = None) -> None:
        """As argparse does, but for the errors of a full disk, which it drops."""
        (file or sys.stdout).write(message)


class _Help(argparse.HelpFormatter):
    """Fills a description paragraph by paragraph, to the width of the terminal."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        return "\n\n".join(super(_Help, self)._fill_text(part, width, indent) for part in text.split("\n\n"))


def _parser(command: str) -> _Parser:
    module = importlib.import_module(f"attncore.cli.{command.replace('-', '_')}")
    parser = _Parser(prog=f"attncore {command}", description=module.__doc__, allow_abbrev=False, formatter_class=_Help)
    module.configure(parser)
    parser.set_defaults(run=module.run)
    return parser


def _overview() -> str:
    rows = "\n".join(f"  {name:12} {text}" for name, text in COMMANDS.items())
    return f"usage: attncore COMMAND [OPTION ...]\n\n{rows}\n\n'attncore COMMAND --help' lists a command's options."


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command. Returns its exit code, also for a user's mistakes, which it prints as one line.

    Without ``argv`` it is the process's last act, and what libraries print afterwards goes to standard error too.
    """
    with prepared(), own_streams(to_the_end=argv is None):
        return _main(argv)


def _main(argv: Sequence[str] | None) -> int:
    words = [*(sys.argv[1:] if argv is None else argv)]  # not list(), which the command of that name replaces
    code = READER_GONE
    try:
        code = _ended(words)
    finally:
        unwritten = settle()
    if isinstance(unwritten, BrokenPipeError):
        return READER_GONE
    if unwritten is not None and code != 2:  # else it was said
        code = _fail(f"standard output: {unwritten.strerror}", 2)
        settle()
    return code


def _ended(words: list[str]) -> int:
    """The exit code of a command, however it ends; a line on standard error says why where it is not the command's."""
    try:
        return _run(words)
    except NoBackendError as error:
        return _fail(error, 3)
    except BrokenPipeError:  # the reader of standard output has gone
        return READER_GONE
    except OSError as error:
        if error.filename is None and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EIO):  # files have their names
            return _fail(f"standard output: {error.strerror}", 2)
        return _fail(error, 2)
    except (ValueError, TypeError, EOFError, ImportError, AttncoreError) as error:
        return _fail(error, 2)
    except MemoryError as error:
        return _fail(f"not enough memory ({error})" if str(error) else "not enough memory", 2)
    except Terminated as error:
        return error.code
    except KeyboardInterrupt as error:
        return _fail(" ".join(("interrupted", *getattr(error, "__notes__", ()))), 130)


def _run(words: list[str]) -> int:
    if not words or words[0] in ("-h", "--help"):
        print(_overview())
        return 0 if words else 2
    if words[0] == "--version":
        print(f"attncore {__version__}")
        return 0
    if words[0] not in COMMANDS:
        near = difflib.get_close_matches(words[0][:40], COMMANDS, 1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise UsageError(f"command: {quoted(words[0])} is not one of {', '.join(COMMANDS)}{hint}")
    parser = _parser(words[0])
    try:
        args = parser.parse_args(words[1:])
    except SystemExit as ended:  # --help
        return int(ended.code or 0)
    with only_json() if getattr(args, "json", False) else contextlib.nullcontext():
        code: int = args.run(args)
    return code


def _fail(error: object, code: int) -> int:
    prefix = "" if isinstance(error, InputLineError) else "attncore: error: "
    text = one_line(error, 1 << 16) or type(error).__name__  # no control codes to a terminal
    with contextlib.suppress(OSError, ValueError):  # standard error is full, is closed, or its reader has gone
        print(prefix + text, file=sys.stderr)
    return code
