"""CUDA graphs of what a model computes between its attention, which itself runs eagerly.

Many backends can be captured in steps of decodes alone. A step with prefills runs so: its tokens are padded to those of
a capture, each part of the model between two calls of attention is a graph, and attention follows the step's own
metadata. The tensors that a layer gives its attention, and the one that it gets back, are those of the capture.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, NamedTuple

import torch
from torch import Tensor

from attncore.errors import CaptureError
from attncore.graphs import is_capturing, uncollected
from attncore.integrations.transformers.forward_pass import (
    NoAttention,
    PagedCaches,
    attncore_context,
    check_caches,
    running_over,
)
from attncore.ops.forward_context import ForwardContext, here
from attncore.quoted import describe_error, type_name
from attncore.show import counted


class _Call(NamedTuple):
    """The attention of one layer, between two graphs."""

    layer: str
    tensors: tuple[Tensor, Tensor, Tensor]
    cache: Any
    output: Tensor


class PiecewiseGraph:
    """A model's step of up to ``num_tokens`` tokens. Made by ``capture_between_attention``.

    ``output`` is what the captured function returned, and where replays write; ``pool`` the memory pool of the graphs.
    """

    def __init__(self, run: Callable[[], Tensor], kv_caches: PagedCaches, pool: Any) -> None:
        self._run, self._caches, self.pool = run, kv_caches, pool
        self._graphs: list[Any] = []
        self._calls: list[_Call] = []
        self._parameters = kv_caches._sinks.current()
        self.num_tokens, self.output = 0, torch.empty(0, device="cpu")

    def replay(self, metadata: Any) -> Tensor:
        """Runs the step of ``metadata`` on the current stream, without a synchronisation; returns ``output``.

        ``metadata`` is a step's, or a mapping of layer names to it where there are several KV-cache groups. Its tokens
        stand in front in the function's inputs. On a device without CUDA graphs the function runs again.
        CaptureError where the step has more tokens than the capture, inside a capture, after ``reset``, and where the
        model was given other tensors as sinks since; what is written to those that it has is followed. TypeError for
        what is no metadata, ValueError for a mapping that lacks a layer.
        """
        if not self._calls:
            raise CaptureError("replay: this graph was reset; capture another")
        found = max(step.num_tokens for step in self._steps(metadata))
        if found > self.num_tokens:
            raise CaptureError(
                f"replay: the step has {counted(found, 'token')}, the capture {self.num_tokens}; capture one of more, "
                "or run the step eagerly"
            )
        if is_capturing(str(self.output.device)):
            raise CaptureError("replay: a stream is capturing, and attention runs eagerly here; end that capture first")
        with torch.inference_mode():
            if self._graphs:
                self._replay(ForwardContext(metadata, self._caches.impls))
            else:
                with attncore_context(metadata, self._caches):
                    self.output.copy_(self._run())
        return self.output

    def _steps(self, metadata: Any) -> list[Any]:
        """The metadata of all layers; TypeError or ValueError where a layer would find none, before anything runs."""
        steps = [metadata]
        if isinstance(metadata, Mapping):
            missing = [call.layer for call in self._calls if call.layer not in metadata]
            if missing:
                raise ValueError(
                    f"metadata: a mapping without layer {missing[0]}; give each layer the step's metadata, or the "
                    "metadata itself where all share it"
                )
            steps = list(metadata.values())
        for step in steps:
            if not hasattr(step, "host"):
                raise TypeError(
                    f"metadata: {type_name(step)} found; give a step's metadata, or a mapping of layer names to it"
                )
        return steps

    def _replay(self, step: ForwardContext) -> None:
        sinks = self._caches._sinks
        if sinks:
            if not sinks.are(self._parameters):
                raise CaptureError(
                    "replay: the model has other tensors as sinks than when this was captured, and graphs compute with "
                    "those of then; capture another"
                )
            sinks.update()
        for graph, call in zip(self._graphs[:-1], self._calls, strict=True):
            graph.replay()
            impl, metadata = step.layer(call.layer)
            impl.forward(*call.tensors, call.cache, metadata, call.output)
        self._graphs[-1].replay()

    def reset(self) -> None:
        """Gives the graphs' memory back."""
        self._graphs, self._calls, self.output = [], [], torch.empty(0, device="cpu")

    def _capture(self) -> None:
        """Runs the function twice without attention: as a warm-up, then into graphs, on a stream of its own."""
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        gc.collect()
        with uncollected(), torch.cuda.stream(stream):
            self._pass(_Seam)
            torch.cuda.synchronize()
            self._begin()
            try:
                self.output = self._pass(lambda layer, graph: _Seam(layer, graph, captures=True))
                self._graphs[-1].capture_end()
            except BaseException as error:
                with suppress(RuntimeError):  # of a capture that is broken already
                    self._graphs[-1].capture_end()
                self.reset()
                if not isinstance(error, RuntimeError):
                    raise
                raise CaptureError(f"run: cannot be captured between its attention: {describe_error(error)}") from error
        torch.cuda.current_stream().wait_stream(stream)

    def _pass(self, seam: Callable[[str, PiecewiseGraph], _Seam]) -> Tensor:
        """The function, whose layers end at a seam instead of attending."""
        self._calls = []
        impls: dict[str, Any] = {name: seam(name, self) for name in self._caches}
        with torch.inference_mode(), running_over(object(), impls, self._caches):
            output = self._run()
        if not isinstance(output, Tensor):
            raise TypeError(f"run: it returned {type_name(output)}; return one tensor, such as the model's logits")
        if not self._calls:
            raise ValueError("run: no layer of kv_caches attended in it; run the model that the caches are of")
        return output

    def _begin(self) -> None:
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin(pool=self.pool)
        self._graphs.append(graph)


class _Seam(NoAttention):
    """In place of a layer's implementation: notes its call and, in a capture, ends one graph and begins the next."""

    def __init__(self, layer: str, graph: PiecewiseGraph, captures: bool = False) -> None:
        self._layer, self._graph, self._captures = layer, graph, captures

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, kv_cache: Any, metadata: Any, output: Tensor | None = None
    ) -> Tensor:
        output = super().forward(query, key, value, kv_cache, metadata, output)
        if self._captures:
            self._graph._graphs[-1].capture_end()
        self._graph._calls.append(_Call(self._layer, (query, key, value), self._graph._caches[self._layer], output))
        self._graph.num_tokens = query.shape[0]
        if self._captures:
            self._graph._begin()
        return output


def capture_between_attention(run: Callable[[], Tensor], kv_caches: PagedCaches, *, pool: Any = None) -> PiecewiseGraph:
    """Captures ``run``, a model's forward pass over ``kv_caches``, in graphs between which attention runs eagerly.

    ``run`` takes no argument, reads tensors that stay where they are, and returns one: for instance
    ``model(input_ids=ids, position_ids=positions, use_cache=False).logits`` with ids and positions of shape (1, T) on
    the device. A replay runs any step of up to T tokens that stand in front there; what stands behind them is computed
    too and means nothing, neither in the inputs nor in the output. The layers of ``compile_layers`` run compiled.

    Graphs that never run at once share memory: ``pool`` is the ``pool`` of another. Called outside of an
    ``attncore_context``. TypeError where ``run`` is no function or returns no tensor, ValueError where no layer attends
    in it. CaptureError inside a capture or a context, and where torch cannot capture the model, with its reason.
    """
    check_caches(kv_caches)
    if not callable(run):
        raise TypeError(f"run: {type_name(run)} found; give a function without arguments that runs the model")
    if here.context is not None:
        raise CaptureError(
            "capture_between_attention: inside a context of a step; capture outside of it, at start-up, and give steps "
            "to replay"
        )
    kv_caches._check_called()
    kv_caches._refuse_states("capture_between_attention")
    kv_caches._refuse_made_sinks("capture_between_attention")
    device = str(next(next(iter(kv_caches._names)).parameters()).device)
    if is_capturing(device):
        raise CaptureError("capture_between_attention: a stream is capturing; end that capture first")
    if not device.startswith("cuda"):
        graph = PiecewiseGraph(run, kv_caches, pool)
        graph.output = graph._pass(_Seam)
        return graph
    graph = PiecewiseGraph(run, kv_caches, torch.cuda.graph_pool_handle() if pool is None else pool)
    graph._capture()
    return graph
