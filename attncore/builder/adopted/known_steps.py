"""The compiled call that builds a step whose tensors lie as those of a step before did (``KnownSteps``)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from attncore import graphs
from attncore.builder.adopted.given import Given, check_memory
from attncore.builder.adopted.host_given import HostLengths, HostStarts, check_agreement
from attncore.builder.adopted.step import AdoptedStep

if TYPE_CHECKING:
    import weakref

    from attncore.builder.adopted.captured_rows import Captured
    from attncore.builder.adopted.device_fields import DeviceFields
    from attncore.builder.adopted.settings import Facts
    from attncore.builder.adopted.size import Size


def known_steps(
    kernels: Any, device: torch.device, entrance: Any, owner: Any, rows: list[Any], max_num_reqs: int,
    *, uniform: bool,
) -> Any:  # fmt: skip
    """KnownSteps of ``rows``; NoKnownSteps where the kernels, or this torch, have not what it takes.

    An engine makes new views of its tensors in each step. What they are is read by torch's functions for DLPack.
    """
    functions = getattr(torch.Tensor, "__dlpack_c_exchange_api__", None)
    if functions is None or not hasattr(kernels, "KnownSteps"):
        return NoKnownSteps()
    ready = None
    if device.type == "cuda":
        ready = torch._C._cuda_isCurrentStreamCapturing, torch._C._cuda_getDevice
    return kernels.KnownSteps(
        functions, torch.Tensor, AdoptedStep, entrance, owner, rows, max_num_reqs, uniform,
        device.type == "cpu", ready, -1 if device.index is None else device.index,
    )  # fmt: skip


class NoKnownSteps:
    """Knows no step: each is searched."""

    checks = False

    def quick(self, *arguments: Any) -> None:
        """None: the longer way has to be taken."""

    step = remember = last_built = quick

    def forget(self) -> None:
        """Nothing to forget."""


def remember(
    known: Any, metadata: AdoptedStep, tensors: tuple[Any, ...], size: Size, captured: Captured | None,
    fields: DeviceFields, facts: Facts,
) -> None:  # fmt: skip
    """Has later steps of these tensors found in one call, and what they make on the device in one launch."""
    graph = captured is not None and metadata.use_cuda_graph
    lends = facts.pad_seq_len and graph and "seq_lens" not in metadata._deferred
    plans = facts.plans and not (captured is not None and graph and captured.plans_itself)
    made = fields.live - metadata._deferred
    alone = not (plans or (facts.pad_seq_len and graph))  # lengths are lent beside what is made
    size.prepared = fields.prepared(size.given, made) if alone else None
    values = {**vars(metadata)}
    del values["builder"]  # it is given with each step: no cycle keeps it
    size.known = known.remember(
        tensors, size.kept, size.given, values, size.host, captured.query_len if captured else 0,
        not (plans or lends or made),
    )  # fmt: skip


def forget(of: weakref.ref[Any]) -> None:
    """Has AdoptedSteps, where they are still there, find no step that they knew."""
    steps = of()
    if steps is not None:
        steps._known.forget()


def device_of(backend: Any) -> torch.device:
    """The device of a backend, numbered where it is a GPU."""
    device = torch.device(backend.config.device)
    return torch.device("cuda", torch.cuda.current_device()) if str(device) == "cuda" else device


def check_ready(device: torch.device) -> None:
    """CaptureError while a stream is capturing, RuntimeError where another device is the current one."""
    if torch.cuda.is_current_stream_capturing():
        graphs.refuse_while_capturing("cuda", "build")
    if torch.cuda.current_device() != device.index:
        raise RuntimeError(
            f"build: cuda:{torch.cuda.current_device()} is the current device, but these steps are on {device}; build "
            f"inside torch.cuda.device({device.index})"
        )


class HostArguments:
    """The arguments of a step on the host, and what is checked of them where the host can read the tensors, too."""

    def __init__(self, facts: Any) -> None:
        self.starts, self.lengths = HostStarts(), HostLengths(facts)

    def read(
        self, num_reqs: int, own: tuple[Any, ...] | None, host_starts: Any, host_lengths: Any, bounded: Any
    ) -> tuple[Any, Any, str]:
        """Starts, lengths (or None) and what these are; ``own``: the tensors, where the host can read them.

        ValueError or TypeError that names the argument.
        """
        starts = self.starts.of(num_reqs, host_starts, None if own is None else own[0])
        lengths, known = self.lengths.of(num_reqs, host_lengths, None if own is None else own[1], bounded)
        if own is not None and not (host_starts is None and host_lengths is None):
            check_agreement(starts, lengths, known, own[:2])
        return starts, lengths, known

    def check(self, tensors: tuple[Any, ...], host_starts: Any, host_lengths: Any, bounded: Any) -> None:
        """The same of tensors on a CPU that are known, whose memory may be less now."""
        check_memory(Given(*tensors))
        self.read(tensors[1].shape[0], tensors, host_starts, host_lengths, bounded)
