"""Calls of a backend's code in a replay: what it raises, and a result of the wrong kind, is a BackendError.

A backend may raise anything, also what would be taken for something else: for a mistake in the trace, for a pipe whose
reader has gone, for memory that does not suffice. ``created`` makes a backend whose calls are guarded, so that neither
the layers of a replay nor a model of transformers nor the builder need a guard of their own. What its attributes raise
where they are read, ``named_errors`` names around all of a replay.
"""

from __future__ import annotations

import dataclasses
import faulthandler
import inspect
import os
import re
import signal
import sys
import threading
from _signal import pthread_sigmask  # type: ignore[import-not-found]  # that of signal is a function of Python
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

from attncore.abstract import AttentionBackend, AttentionImpl, BackendConfig
from attncore.errors import AttncoreError, PluginError
from attncore.interrupts import raises_again
from attncore.process_end import end_if_forked
from attncore.quoted import MOST, describe_error, one_line, quoted, type_name
from attncore.registry.plugins.left_as_found import Signals, Wakeup
from attncore.registry.spec.backend_spec import BackendSpec
from attncore.show import counted
from attncore.standard_output import found_streams, put_streams

if TYPE_CHECKING:
    from attncore.registry.choice.choice import Choice

_FIELDS = frozenset(field.name for field in dataclasses.fields(BackendConfig))
_OF_LAYERS = frozenset(inspect.signature(AttentionBackend.impl).parameters)
_OVERRIDDEN = (
    "from_host", "check_metadata", "record_plan", "prepare_capture", "kv_cache_views", "kv_cache_shape",
    "kv_cache_torch_dtype", "kv_cache_block_axis",
)  # fmt: skip
"""Methods that are guarded where the backend's class has them: attncore's own need no guard."""
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGALRM, signal.SIGVTALRM, signal.SIGPROF)
"""Those that end a command, of timers too."""
_OF_TIMERS = (signal.SIGALRM, signal.SIGVTALRM, signal.SIGPROF)
_TRIES = 100
_NO_MEMORY = ("allocate memory", "out of memory", "Storage size calculation overflowed")
"""What torch's errors say where a tensor does not fit."""


class BackendError(AttncoreError):
    """A backend failed, or returned what the contract does not allow; names it, its distribution and the call."""


def created(choice: Choice, device: str | None = None) -> AttentionBackend:
    """The backend that ``choice`` creates; its methods, and ``forward`` of its layers, raise BackendError from then on.

    As they are come: KeyboardInterrupt; ValueError beginning with the argument's name where the backend refuses its
    configuration, a layer or ``num_blocks``; and what torch raises in ``allocate_kv_cache`` and ``forward`` where
    memory does not suffice.
    """
    guard = _Guard(f"backend {choice.candidate.label}")
    make = partial(_made, choice, device)
    backend: AttentionBackend = guard.call("its creation", make, spared=partial(_refuses, _FIELDS))
    _CREATED.update(dict.fromkeys(_packages_of(type(backend)), guard.whose))
    guard.call("its creation", partial(_guarded, backend, guard))
    return backend


def _guarded(backend: AttentionBackend, guard: _Guard) -> None:
    allocate = partial(_allocated, backend, backend.allocate_kv_cache)
    calls = {
        "impl": partial(guard.call, "impl", backend.impl, spared=partial(_refuses, _OF_LAYERS), finish=guard.layer),
        "allocate_kv_cache": partial(
            guard.call, "allocate_kv_cache", allocate, spared=_refuses_blocks, finish=_check_cache
        ),
        "plan": partial(guard.call, "plan", backend.plan),
    }
    for name in _OVERRIDDEN:
        if getattr(type(backend), name) is not getattr(AttentionBackend, name):
            finish = _check_tensor if name == "from_host" else None
            calls[name] = partial(guard.call, name, getattr(backend, name), finish=finish)
    _put_in_place(backend, calls)


def _made(choice: Choice, device: str | None) -> AttentionBackend:
    backend = choice.create(device)
    if not isinstance(backend.name, str) or not isinstance(backend.config, BackendConfig):
        raise _WrongResultError("left name or config as the contract does not say; AttentionBackend.__init__ sets both")
    bool(backend.has_plan)  # the class may replace it by code of its own
    if (spec := backend.spec) is not None and not isinstance(spec, BackendSpec):
        raise _WrongResultError(f"left {_described(spec)} as its spec; AttentionBackend.spec is its configuration's")
    return backend


_CREATED: dict[str, str] = {}
"""The packages with the code of the backends that ``created`` has made -> what names each in an error."""


def _packages_of(kind: type) -> set[str]:
    """The packages of a backend's class and of the backends that it extends, but for attncore's own."""
    backends = (one for one in type.mro(kind) if issubclass(one, AttentionBackend))
    return {str(one.__module__).partition(".")[0] for one in backends} - {"attncore"}


@contextmanager
def named_errors() -> Iterator[None]:
    """BackendError for what ``backend_error`` names; all else is raised as it is."""
    try:
        yield
    except BaseException as error:
        if (named := backend_error(error)) is not None:
            raise named from error
        raise


def backend_error(error: BaseException) -> BackendError | None:
    """The BackendError for what a backend's code has raised outside of its guarded calls; None for any other error.

    Attributes of a backend and of its layers are read in many places, and its class may have a property for each.
    """
    if isinstance(error, KeyboardInterrupt | BackendError):
        return None
    failed, trace = "", error.__traceback__
    while trace is not None:
        code, module = trace.tb_frame.f_code, trace.tb_frame.f_globals.get("__name__")
        if code is _Guard.call.__code__:  # which has raised what is to be told as it is
            return None
        whose = _CREATED.get(str(module).partition(".")[0])
        failed = failed or (f"{whose} failed in {one_line(code.co_name, MOST)}" if whose else "")
        trace = trace.tb_next
    return BackendError(f"{failed}: {describe_error(error)}") if failed else None


def _put_in_place(one: Any, calls: Mapping[str, Callable[..., Any]]) -> None:
    """Has ``calls`` in the place of methods of one object, also where its class has a property there, which would come
    first.
    """
    kind: Any = type(one)
    static = {name: type(inspect.getattr_static(kind, name, None)) for name in calls}
    if before := [name for name, what in static.items() if hasattr(what, "__set__") or hasattr(what, "__delete__")]:
        one.__class__ = type(kind)(kind.__name__, (kind,), {"__module__": kind.__module__, **dict.fromkeys(before)})
    vars(one).update(calls)


class _WrongResultError(Exception):
    """What a call returned is not what the contract says; the text says what it is."""


class _Guard:
    """Calls the code of one backend."""

    def __init__(self, whose: str) -> None:
        self.whose = whose
        self._inside = False
        """Whether its code runs: what it calls of itself raises what it would raise without a guard."""
        self._streams: dict[str, Any] = {}
        self._limit = 0
        self._process = os.getpid()
        self._signals, self._wakeup = Signals(_SIGNALS), Wakeup()

    def call(
        self,
        what: str,
        function: Callable[..., Any],
        *args: Any,
        spared: Callable[[BaseException], bool] = lambda error: False,
        finish: Callable[..., Any] | None = None,
        **kwargs: Any,
    ) -> Any:
        """``function`` of the arguments, then ``finish`` of its result and the positional ones; ``what`` names it.

        An error of which ``spared`` is true is raised as it is. Afterwards the streams of ``sys`` and the recursion
        limit are those of before the call, and timers and signals are those of before the backend: one that runs out
        later would end the command. A child process that it has forked ends here.
        """
        if self._inside:
            return function(*args, **kwargs)
        in_main = threading.current_thread() is threading.main_thread()
        self._streams, self._limit, self._inside = found_streams(), sys.getrecursionlimit(), True
        try:
            try:
                result = function(*args, **kwargs)
                if finish is not None:
                    finish(result, *args)
            finally:
                # First, and one call of C: afterwards each of these may interrupt once, and then no more, what follows.
                if in_main:
                    pthread_sigmask(signal.SIG_BLOCK, _OF_TIMERS)
                self._put_all_back()
        except KeyboardInterrupt:
            raise
        except _WrongResultError as error:
            raise BackendError(f"{self.whose}: {what} {error}") from None
        except BaseException as error:
            if self._inside:  # a handler of the backend's own has raised before
                self._put_all_back()
            if spared(error):
                raise
            cause = error.__cause__ if isinstance(error, PluginError) and error.__cause__ is not None else error
            raise BackendError(f"{self.whose} failed in {what}: {describe_error(cause)}") from error
        finally:
            if self._inside:
                self._put_all_back()
        return result

    def _put_all_back(self) -> None:
        """``_put_back``, begun again where a handler of the backend's raises meanwhile: its timer may run on."""
        for _ in range(_TRIES):
            try:
                self._put_back()
            except Exception:
                if self._inside:
                    continue
            return
        self._put_back()

    def _put_back(self) -> None:
        """Has streams, recursion limit, timers and signals that end a command as they were; twice is as once."""
        sys.setrecursionlimit(self._limit)  # what follows calls functions
        if threading.current_thread() is threading.main_thread():
            if raises_again():
                pthread_sigmask(signal.SIG_SETMASK, self._signals.blocked)
            else:
                self._signals.restore()  # then no handler of the backend's interrupts what follows
            self._wakeup.restore()
        end_if_forked(self._process)
        put_streams(self._streams)
        faulthandler.cancel_dump_traceback_later()  # a watchdog of a call's would end the command after it
        self._inside = False

    def layer(self, impl: Any, layer_name: Any) -> None:
        """Has ``forward`` and ``forward_with_lse`` of a layer that ``impl`` returned guarded, too."""
        if not isinstance(impl, AttentionImpl):
            raise _WrongResultError(f"returned {_described(impl)}; the contract says an AttentionImpl")
        calls = {}
        for name, check in (("forward", _check_output), ("forward_with_lse", _check_output_and_lse)):
            what, finish = f"{name} of layer {quoted(layer_name)}", partial(check, impl.backend.config)
            calls[name] = partial(self.call, what, getattr(impl, name), spared=_torch_lacks_memory, finish=finish)
        _put_in_place(impl, calls)


def _refuses(names: Collection[str], error: BaseException) -> bool:
    """Whether it is a refusal as the contract has it: a ValueError that begins with an argument's name."""
    if not isinstance(error, ValueError):
        return False
    found = re.match(r"(\w+): ", describe_error(error).partition(": ")[2])
    return found is not None and found[1] in names


def _refuses_blocks(error: BaseException) -> bool:
    return _lacks_memory(error) or _refuses({"num_blocks"}, error)


def _lacks_memory(error: BaseException) -> bool:
    return isinstance(error, MemoryError) or _torch_lacks_memory(error)


def _torch_lacks_memory(error: BaseException) -> bool:
    """Whether torch says that memory does not suffice, on a CPU by a plain RuntimeError: a smaller run may do."""
    import torch

    if isinstance(error, torch.OutOfMemoryError):
        return True
    return type(error) is RuntimeError and any(words in describe_error(error) for words in _NO_MEMORY)


def _allocated(backend: AttentionBackend, allocate: Callable[[Any], Any], num_blocks: Any) -> Any:
    """A cache; memory that does not suffice for a shape that is none of ``num_blocks`` is the backend's fault."""
    try:
        cache = allocate(num_blocks)
    except Exception as error:
        if _lacks_memory(error):
            _check_cache_shape(backend, num_blocks)
        raise
    return cache


def _check_cache_shape(backend: AttentionBackend, num_blocks: int) -> None:
    """_WrongResultError unless ``kv_cache_shape`` has one axis that grows with the blocks, and has as many of them."""
    config = backend.config
    of_one, of_two, shape = (
        tuple(backend.kv_cache_shape(count, config.block_size, config.num_kv_heads, config.head_size))
        for count in (1, 2, num_blocks)
    )
    grown = [size for size, one, two in zip(shape, of_one, of_two, strict=False) if one != two]
    if not len(of_one) == len(of_two) == len(shape) or grown != [num_blocks]:
        raise _WrongResultError(
            f"does not fit in memory: kv_cache_shape is {quoted(shape)} for {counted(num_blocks, 'block')}; the "
            "contract says that exactly one axis grows with num_blocks"
        )


def _check_cache(cache: Any, *_: Any) -> None:
    if cache is None:
        raise _WrongResultError("returned None; the contract says one layer's cache")


def _check_tensor(found: Any, *_: Any) -> None:
    import torch

    from attncore.array_arguments import why_not_plain  # it imports NumPy

    if not isinstance(found, torch.Tensor):
        raise _WrongResultError(f"returned {_described(found)}; the contract says a tensor")
    if (why := why_not_plain(found)) is not None:
        raise _WrongResultError(f"returned a tensor {why}; the contract says a plain strided tensor")


def _check_output(config: BackendConfig, output: Any, query: Any, *_: Any) -> None:
    shape = (len(query), config.num_heads, config.head_size_v or config.head_size)
    _check_like("", output, shape, query.dtype, query.device)


def _check_output_and_lse(config: BackendConfig, both: Any, query: Any, *_: Any) -> None:
    import torch

    if not isinstance(both, tuple) or len(both) != 2:
        raise _WrongResultError(f"returned {_described(both)}; the contract says an output and its log-sum-exp")
    _check_output(config, both[0], query)
    _check_like("a log-sum-exp, ", both[1], (len(query), config.num_heads), torch.float32, query.device)


def _check_like(which: str, found: Any, shape: tuple[int, ...], dtype: Any, device: Any) -> None:
    """_WrongResultError where ``found`` is no tensor of that shape and dtype on that device."""
    import torch

    from attncore.array_arguments import why_not_plain  # it imports NumPy

    is_tensor, wanted = isinstance(found, torch.Tensor), f"a tensor {shape} of {dtype} on {device}"
    if is_tensor and (why := why_not_plain(found)) is not None:
        raise _WrongResultError(f"returned {which}a tensor {why}; the contract says {wanted}, plain and strided")
    if not is_tensor or (tuple(found.shape), found.dtype, found.device) != (shape, dtype, device):
        raise _WrongResultError(f"returned {which}{_described(found)}; the contract says {wanted}")


def _described(value: Any) -> str:
    import torch

    if isinstance(value, torch.Tensor):
        return f"a tensor {tuple(value.shape)} of {value.dtype} on {value.device}"
    return "None" if value is None else f"a value of type {type_name(value)}"
