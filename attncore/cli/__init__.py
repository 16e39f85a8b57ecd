"""The command line. Each command is the module of its name, imported only when it runs.

A command's module has ``configure(parser)`` and ``run(args) -> int``; its docstring is the command's description. Exit
codes: 0 success, 1 a finding, 2 bad usage or input (one line on standard error), 3 no usable backend.

- ``replay``, ``build``, ``list``, ``explain``, ``doctor``, ``verify``, ``new_backend``: the commands.
- ``replay_options``: the options of ``replay``; ``persistent_builder_options``: those it shares with ``build``.
- ``argument_types``: types for argparse; ``usage_errors``: mistakes of a user.
- ``output``, ``progress_bar``: JSON, tables, a bar.
"""

from __future__ import annotations

import argparse
import contextlib
import difflib
import importlib
import os
import sys
from collections.abc import Sequence
from typing import NoReturn

from attncore._version import __version__
from attncore.cli.output import only_json
from attncore.cli.usage_errors import InputLineError, UsageError
from attncore.errors import AttncoreError, NoBackendError
from attncore.registry.printable import one_line
from attncore.standard_output import own_standard_output

COMMANDS = {
    "replay": "replay a request trace: scheduling, paged cache, metadata and attention, verified",
    "build": "read batches (JSON Lines), write their metadata",
    "list": "list the attention backends that are installed",
    "explain": "say which backend would be chosen, on this machine or another, and why not the others",
    "doctor": "check the installation: versions, environment, each plugin in a child process",
    "verify": "compare a backend with the reference on this machine, in a child process",
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
    with own_standard_output(to_the_end=argv is None):
        return _main(argv)


def _main(argv: Sequence[str] | None) -> int:
    for name in ("stdin", "stdout", "stderr"):  # closed by the parent process: read nothing, write nothing
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "r" if name == "stdin" else "w"))  # noqa: SIM115
    words = [*(sys.argv[1:] if argv is None else argv)]  # not list(), which the command of that name replaces
    if not words or words[0] in ("-h", "--help"):
        print(_overview())
        return 0 if words else 2
    if words[0] == "--version":
        print(f"attncore {__version__}")
        return 0
    try:
        if words[0] not in COMMANDS:
            near = difflib.get_close_matches(words[0], COMMANDS, 1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise UsageError(f"command: {words[0]!r} is not one of {', '.join(COMMANDS)}{hint}")
        args = _parser(words[0]).parse_args(words[1:])
        with only_json() if getattr(args, "json", False) else contextlib.nullcontext():
            code: int = args.run(args)
        sys.stdout.flush()
        return code
    except NoBackendError as error:
        return _fail(error, 3)
    except BrokenPipeError:  # the reader of the pipe has gone
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except (ValueError, TypeError, OSError, EOFError, ImportError, AttncoreError) as error:
        return _fail(error, 2)
    except MemoryError as error:
        return _fail(f"not enough memory ({error})" if str(error) else "not enough memory", 2)
    except KeyboardInterrupt as error:
        return _fail(" ".join(("interrupted", *getattr(error, "__notes__", ()))), 130)


def _fail(error: object, code: int) -> int:
    prefix = "" if isinstance(error, InputLineError) else "attncore: error: "
    print(prefix + (one_line(error, 1 << 16) or type(error).__name__), file=sys.stderr)
    return code
