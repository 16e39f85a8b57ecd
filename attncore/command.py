"""What every command has in common: how it ends, whatever becomes of it, and how a user's mistake is told.

``run_command`` is around a command, of ``attncore`` and of the conformance kit. A command's streams may be closed,
full, or a pipe without a reader, and their encoding may lack a letter; a signal may arrive. Nothing of it is a
traceback: the exit code says it, and where there is something to say, one line on standard error.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import importlib
import os
import re
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import FrameType, MappingProxyType
from typing import TYPE_CHECKING, Any, NoReturn

from attncore.arguments import real_number, whole_number_of_63_bits
from attncore.collector import end_without_search
from attncore.did_you_mean import close_name, did_you_mean
from attncore.errors import AttncoreError, NoBackendError
from attncore.how_to_install import install_required
from attncore.process_end import end_if_forked, keep_exit_code
from attncore.quoted import MAX_PART, MOST, describe_error, notes, one_line, quoted
from attncore.standard_output import kept_stream, own_streams
from attncore.terminal import print_lines

if TYPE_CHECKING:
    from _typeshed import SupportsWrite

READER_GONE = 128 + 13
"""The exit code where standard output is a pipe that is read no more: as if by SIGPIPE, like other tools."""


MAX_TEXT = 1 << 16
"""Letters of an error; a refusal by every one of many backends takes some thousands."""

_ENDING = ("SIGTERM", "SIGHUP", "SIGALRM", "SIGVTALRM", "SIGPROF")
"""Signals that end a process: sent to it, or of a timer that code of others has set."""
_OF_A_STREAM = (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EAGAIN, errno.EBADF)
"""Errors of a stream that is full, fails, does not wait for its reader, or is closed."""

_LONG_WORD = re.compile(rf"\S{{{MAX_PART + 1},}}")
"""What is no sentence, such as the name of a file that can be no file's."""

_NUMBERS: dict[Any, Callable[[str], float]] = {int: whole_number_of_63_bits, float: real_number}
"""How the values of these types are read: Python takes blanks, underscores and the digits of other scripts, too."""


class Terminated(KeyboardInterrupt):
    """A signal of _ENDING arrived. An exception, so that what a command leaves half-written is removed."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.code = 128 + number


class UsageError(ValueError):
    """A mistake on the command line or in an input file; its text is the line that the user sees."""

    teller = "attncore: error: "
    """What stands before the text."""


class InputLineError(UsageError):
    """A mistake in one line of a stream: its text begins with ``line N:`` and is printed as it is."""

    teller = ""


def run_command(command: Callable[[], int], *, to_the_end: bool) -> int:
    """Run ``command``; its exit code, or that of the error that ended it.

    With ``to_the_end`` it is the process's last act: what libraries print afterwards goes to standard error too, and
    nothing that they do at its end changes its exit code. A child process that the command forked ends here.
    """
    if to_the_end:
        end_without_search()
        keep_exit_code()
    with prepared(), own_streams(to_the_end=to_the_end):
        code = READER_GONE
        try:
            code = _ended(command)
        finally:
            unwritten = settle()
        if isinstance(unwritten, BrokenPipeError):
            return READER_GONE
        if unwritten is not None and code != 2:  # else it was said
            code = _fail_of_output(unwritten)
            settle()
        return code


def check_current_folder() -> None:
    """UsageError where the current folder is gone: torch's products of matrices end a process there, without a word of
    which folder.
    """
    try:
        os.getcwd()
    except OSError as error:
        raise UsageError("the current folder is gone: torch cannot run there; change to one that exists") from error


def load_torch(*, waiting: int = 1) -> None:
    """Import torch, where it is installed. An interrupt waits until that is done; a second one does not, or the one
    behind as many as are ``waiting``.

    torch's C++ code imports modules, too, and drops what is raised in them: a Ctrl-C would be lost, and half of numpy
    be left. Elsewhere in it an exception ends the process by SIGABRT.
    """
    with _interrupts_waiting(waiting), contextlib.suppress(ImportError):  # whoever needs it says what is missing
        importlib.import_module("torch")


@contextlib.contextmanager
def _interrupts_waiting(most: int) -> Iterator[None]:
    numbers = [getattr(signal, name) for name in ("SIGINT", *_ENDING) if hasattr(signal, name)]
    found = {one: handler for one in numbers if callable(handler := signal.getsignal(one))}
    if threading.current_thread() is not threading.main_thread():
        found.clear()  # no signal interrupts another
    came: list[int] = []

    def wait(number: int, frame: FrameType | None) -> None:
        came.append(number)
        if len(came) > most:
            found[number](number, frame)

    try:
        for number in found:
            signal.signal(number, wait)
        yield
    finally:
        for number, handler in found.items():
            signal.signal(number, handler)
        for number in came[:1]:
            found[number](number, None)


def _ended(command: Callable[[], int]) -> int:
    """The exit code of a command, however it ends; a line on standard error says why where it is not the command's."""
    process = os.getpid()
    try:
        try:
            return command()
        finally:
            end_if_forked(process)
    except NoBackendError as error:
        return fail(error, 3)
    except BrokenPipeError:  # the reader of standard output has gone
        return READER_GONE
    except OSError as error:
        if error.filename is None and error.errno in _OF_A_STREAM:  # files have their names
            return _fail_of_output(error)
        return fail(error, 2)
    except ModuleNotFoundError as error:
        how = install_required(error.name)
        return fail(f"{error.name} is not installed: {how}" if how else error, 2)
    except (ValueError, TypeError, EOFError, ImportError, AttncoreError) as error:
        return fail(error, 2)
    except MemoryError as error:
        return fail(f"not enough memory ({error})" if str(error) else "not enough memory", 2)
    except Terminated as error:
        return error.code
    except KeyboardInterrupt as error:
        return fail(" ".join(("interrupted", *notes(error))), 130)
    except SystemExit as error:  # of a library's code: nothing was found to be right
        return fail(f"the command was ended before its end: {describe_error(error)}", 1)


def _fail_of_output(error: OSError) -> int:
    return fail(f"standard output: {'it is closed' if error.errno == errno.EBADF else error.strerror}", 2)


def fail(error: object, code: int) -> int:
    """Print an error or a sentence on one line of standard error, a refusal on several; returns ``code``."""
    text = _LONG_WORD.sub(lambda word: one_line(word[0], MOST), _text(error) or type(error).__name__)
    with contextlib.suppress(OSError, ValueError):  # standard error is full, is closed, or its reader has gone
        print_lines(getattr(error, "teller", UsageError.teller) + text, kept_stream("stderr"))
    return code


def _text(error: object) -> str:
    """The text without control codes: on one line, or where no backend can be used on one for each reason."""
    if not isinstance(error, NoBackendError):
        return one_line(error, MAX_TEXT)
    lines = str(error)[:MAX_TEXT].split("\n")
    return "\n".join(line[: len(line) - len(line.lstrip(" "))] + one_line(line, MAX_TEXT) for line in lines)


class Parser(argparse.ArgumentParser):
    """argparse without the usage text before an error: one line says it, which quotes what was given in short."""

    _words: Sequence[str] = ()
    called_here: Mapping[str, str] = MappingProxyType({})
    """By ``name_in_place_of``."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """As argparse does; what was given is kept, for ``error``."""
        self._words = sys.argv[1:] if args is None else args
        return super().parse_known_args(args, namespace)

    def error(self, message: str) -> NoReturn:
        message = message.removeprefix("argument ")  # so that it begins with the option's name
        if message.startswith("the following arguments are required"):  # a misspelt option comes first
            options = [word.partition("=")[0] for word in self._words if word.startswith("--") and word != "--"]
            if (strange := next((one for one in options if one not in self._option_string_actions), None)) is not None:
                message = f"unrecognized arguments: {strange}"
        option, lacks, _ = message.partition(": expected one argument")
        if lacks:
            action = self._option_string_actions.get(option.rpartition("/")[2])
            message = f"{option}: no {action.metavar or 'value'} given" if action else message
        required, none, names = message.partition("the following arguments are required: ")
        if none and not required:
            what = next((action.help for action in self._actions if names == action.metavar), None)
            says = f"it is {what}" if what else f"{self.prog} --help says what they are"
            message = f"{names}: none given; {says}"
        name, unknown, words = message.partition("unrecognized arguments: ")
        if unknown and not name:
            shown = one_line(words, MOST) if words.strip() else quoted(words)  # a variable of the shell that is not set
            option = shown.split(maxsplit=1)[0].partition("=")[0]
            # Without dashes, which make any two short words alike.
            known = {name.lstrip("-"): name for name in self._option_string_actions if name.startswith("--")}
            close = close_name(option.lstrip("-"), known)
            hint = f"; did you mean {known[close]}?" if close else f"; {self.prog} --help lists the options"
            if (here := self.called_here.get(option)) is not None:
                hint = f"; {self.prog} has {here} for that"
            raise UsageError(unknown + shown + hint)
        for word in self._words:
            for part in (word, word.partition("=")[2]):
                if len(part) > MOST:
                    message = message.replace(repr(part), quoted(part)).replace(part, one_line(part, MOST))
        raise UsageError(message)

    def _get_values(self, action: argparse.Action, arg_strings: list[str]) -> Any:
        """As argparse does; a ``--`` behind another is a value. Python 3.11 makes an empty list of it."""
        if action.nargs is None and arg_strings == ["--"]:
            return self._get_value(action, "--")
        return super()._get_values(action, arg_strings)

    def _get_value(self, action: argparse.Action, arg_string: str) -> Any:
        """As argparse does; an empty text, as of a variable of the shell that is not set, is no value of any option."""
        if arg_string == "" and (action.type is None or isinstance(action.type, type)):  # a function says what it takes
            raise argparse.ArgumentError(action, "'' is empty; give a value")
        if action.type in _NUMBERS:
            try:
                return _NUMBERS[action.type](arg_string)
            except ValueError as error:
                raise argparse.ArgumentError(action, str(error)) from None
        return super()._get_value(action, arg_string)

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        """As argparse does; a misspelt choice is guessed."""
        try:
            super()._check_value(action, value)
        except argparse.ArgumentError as error:
            error.message += did_you_mean(value, map(str, action.choices or ()))
            raise

    def in_words_of_options(self, error: Exception, args: argparse.Namespace) -> None:
        """Has an error that begins with the name of an argument name the option that states it, as it was typed
        (``NAME`` where it is no option).

        An option without a value states nothing. A UsageError is left as it is: it may begin with the name of a file.
        """
        if isinstance(error, UsageError):
            return
        text = str(error)
        options = {
            action.dest: next(
                (one for one in reversed(action.option_strings) if one.startswith("--")), str(action.metavar)
            )
            for action in self._actions
            if getattr(args, action.dest, None) is not None
        }
        name, colon, rest = text.partition(":")
        if not colon or name not in options or error.args[:1] != (text,):
            return
        rest = rest.replace(", named by the request, ", " ")  # by the option, which the error begins with
        others = "|".join(sorted(other for other in options if "_" in other))
        if others:  # names of one word may be plain words
            rest = re.sub(rf"(?<![\w./'\"-])({others})(?![\w./'\"-])", lambda found: options[found[1]], rest)
        error.args = (f"{options[name]}:{rest}", *error.args[1:])

    def _print_message(self, message: str, file: SupportsWrite[str] | None = None) -> None:
        """As argparse does, but for the errors of a full disk, which it drops."""
        (file or sys.stdout).write(message)


@contextlib.contextmanager
def prepared() -> Iterator[None]:
    """Around a command: streams that were closed have files again, and signals that end it raise Terminated.

    Standard input is empty then, standard error goes nowhere, and what is written to standard output fails. Python's
    limit of an integer's digits is in force, also where PYTHONINTMAXSTRDIGITS lifts it: a line of millions of digits
    would take minutes, which no signal ends."""
    for name in ("stdin", "stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            null = os.open(os.devnull, os.O_WRONLY if name == "stderr" else os.O_RDONLY)
            setattr(sys, name, open(null, "r" if name == "stdin" else "w"))  # noqa: SIM115
        elif name != "stdin" and getattr(stream, "errors", None) == "strict":
            stream.reconfigure(errors="backslashreplace")  # a file's name may have what the encoding lacks
    before = {}
    if threading.current_thread() is threading.main_thread():
        numbers = [getattr(signal, name) for name in _ENDING if hasattr(signal, name)]
        before = {one: signal.signal(one, _raise) for one in numbers if signal.getsignal(one) is signal.SIG_DFL}
        if signal.getsignal(signal.SIGCHLD) is signal.SIG_IGN:  # of a daemon: no child could be waited for
            before[signal.SIGCHLD] = signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    digits, most = sys.get_int_max_str_digits(), sys.int_info.default_max_str_digits
    try:
        sys.set_int_max_str_digits(min(digits or most, most))  # 0 is none
        yield
    finally:
        sys.set_int_max_str_digits(digits)
        for number, handler in before.items():
            signal.signal(number, handler)


def _raise(number: int, frame: FrameType | None) -> NoReturn:
    raise Terminated(number)


def settle() -> OSError | None:
    """Writes what is buffered for standard output and error; where that fails, drops it and returns standard output's
    error. The interpreter would try again at its end, and fail with a text of its own."""
    found = None
    for stream in (kept_stream("stderr"), kept_stream("stdout")):
        try:
            stream.flush()
        except OSError as error:
            found = error
            with contextlib.suppress(OSError, ValueError):  # no file behind it
                null = os.open(os.devnull, os.O_WRONLY)
                os.dup2(null, getattr(stream, "own", stream).fileno())
                os.close(null)
            with contextlib.suppress(OSError):
                stream.flush()
        except (ValueError, AttributeError):  # a plugin has closed it, or put something else in its place
            found = OSError(errno.EBADF, os.strerror(errno.EBADF))
        else:
            found = None
    return found


def name_in_place_of(parser: argparse.ArgumentParser, **options: str) -> None:
    """What the command has in place of other commands' ``options``, for the error that one of them is unknown here."""
    if isinstance(parser, Parser):
        parser.called_here = {f"--{name}": here for name, here in options.items()}
