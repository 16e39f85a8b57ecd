"""The command line. Each command is the module of its name, imported only when it runs.

A command's module has ``configure(parser)`` and ``run(args) -> int``; its docstring is the command's description. Exit
codes: 0 success, 1 a finding, 2 bad usage or input (one line on standard error), 3 no usable backend (a line on
standard error, and one for each reason; ``explain`` prints them as its result), 130 interrupted, 141 the pipe that it
writes to is read no more (silently), 143 terminated, and 128 more than the number of a timer's signal. On a terminal,
lines are wrapped to its width.

- ``replay``, ``build``, ``list``, ``show``, ``explain``, ``doctor``, ``verify``, ``bench``,
  ``new_backend``: the commands.
- ``replay_options``: the options of ``replay``; ``persistent_builder_options``: those it shares with ``build``.
- ``argument_types``: types for argparse; ``installed_backends``: backends by name; ``completion``: scripts by which a
  shell completes a command line; ``shells``: which shells.
- ``output``, ``progress_bar``: tables, a bar; ``typed_input``: what is said on a terminal that input is read from.

How a command ends is ``attncore.command``, which the conformance kit's command shares.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import sys
import textwrap
from collections.abc import Sequence
from types import ModuleType

from attncore._version import __version__
from attncore.cli.shells import SHELLS
from attncore.collector import resume
from attncore.command import Parser, UsageError, run_command
from attncore.did_you_mean import did_you_mean
from attncore.errors import NoBackendError
from attncore.quoted import quoted
from attncore.terminal import columns_of_help, wrapped

COMMANDS = {
    "replay": "replay a trace of requests through paged attention, verified",
    "build": "read batches (JSON Lines), write their metadata",
    "list": "list the attention backends that are installed",
    "show": "show what a backend has, or the capability matrix of all",
    "explain": "say which backend is chosen for a model, and why not others",
    "doctor": "check the installation: versions, environment, each plugin",
    "verify": "compare a backend with the reference on this machine",
    "bench": "time a backend's steps, and compare them with saved runs",
    "new-backend": "write the repository of a new backend, to be changed",
}


_OPTIONS = ("--help", "--version", "--print-completion")


class _Help(argparse.HelpFormatter):
    """Fills a description paragraph by paragraph, to the width of the terminal, but for a line of JSON."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, width=columns_of_help() - 2)

    def _split_lines(self, text: str, width: int) -> list[str]:
        return textwrap.wrap(" ".join(text.split()), width, break_on_hyphens=False)  # nor the name of an option

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        return "\n\n".join(
            # A line of input to copy is on one line: a terminal breaks it, and what is copied is in one piece.
            " ".join(part.split()) if part.startswith("{") else super(_Help, self)._fill_text(part, width, indent)
            for part in text.split("\n\n")
        )


def _module(command: str) -> ModuleType:
    return importlib.import_module(f"attncore.cli.{command.replace('-', '_')}")


def _parser(command: str) -> Parser:
    module = _module(command)
    parser = Parser(prog=f"attncore {command}", description=module.__doc__, allow_abbrev=False, formatter_class=_Help)
    module.configure(parser)
    names = [f"[{one.metavar}]" if one.nargs == "?" else f"{one.metavar}" for one in parser._get_positional_actions()]
    parser.usage = " ".join(("%(prog)s [OPTION ...]", *names))  # the options are listed below it, each with its help
    parser.set_defaults(run=module.run)
    return parser


def _overview() -> str:
    rows = (f"  {name:12} {text}" for name, text in COMMANDS.items())
    width = columns_of_help()
    shells = f"{', '.join(SHELLS[:-1])} or {SHELLS[-1]}"
    lines = (
        "usage: attncore COMMAND [OPTION ...]",
        "",
        *(wrapped(row, width, 15) for row in rows),
        "",
        wrapped("'attncore COMMAND --help' lists a command's options.", width),
        wrapped(f"'attncore --print-completion SHELL' prints what completes them in {shells}.", width),
    )
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command. Returns its exit code, also for a user's mistakes, which it prints as one line.

    Without ``argv`` it is the process's last act, and what libraries print afterwards goes to standard error too.
    """
    words = [*(sys.argv[1:] if argv is None else argv)]  # not list(), which the command of that name replaces
    return run_command(lambda: _run(words, argv is None), to_the_end=argv is None)


def _run(words: list[str], to_the_end: bool) -> int:
    if words[0:1] == ["help"]:
        words = [*(word for word in words[1:2] if word != "help"), "--help"]
    if not words or words[0] in ("-h", "--help"):
        print(_overview())
        return 0 if words else 2
    if words[0] in ("-V", "--version", "version"):
        print(f"attncore {__version__}")
        return 0
    if words[0] == "--print-completion":
        from attncore.cli.completion import completion_script

        commands = {name: (text, _module(name).configure) for name, text in COMMANDS.items()}
        print(completion_script(" ".join(words[1:]), commands))
        return 0
    if words[0].startswith("-"):
        hint = did_you_mean(words[0], _OPTIONS) or "; attncore --help lists the commands"
        raise UsageError(f"command: {quoted(words[0])} is neither a command nor an option{hint}")
    if words[0] not in COMMANDS:
        hint = did_you_mean(words[0], COMMANDS)
        raise UsageError(f"command: {quoted(words[0])} is not one of {', '.join(COMMANDS)}{hint}")
    parser = _parser(words[0])
    if to_the_end:
        resume()
    try:
        args = parser.parse_args(words[1:])
    except SystemExit as ended:  # --help
        return int(ended.code or 0)
    with _output(args, to_the_end):
        try:
            code: int = args.run(args)
        except (ValueError, TypeError, NoBackendError) as error:
            parser.in_words_of_options(error, args)
            raise
    return code


def _output(args: argparse.Namespace, to_the_end: bool) -> contextlib.AbstractContextManager[None]:
    """Around a command, which prints JSON alone where that is asked for."""
    if not getattr(args, "json", False):
        return contextlib.nullcontext()
    from attncore.json_output import only_json  # loaded before plugins, which may put another ``json`` into sys.modules

    return only_json(True, to_the_end=to_the_end)
