"""The attention layers of a replay, each with a paged cache of its own."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import contextmanager
from time import perf_counter_ns
from typing import TYPE_CHECKING, Any

from attncore.replay.checks.attention_check import AttentionCheck
from attncore.replay.model_error import SMALLER_STEPS, memory_error_as_model_error
from attncore.replay.token_content import Content, step_content
from attncore.show import counted

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch import Tensor

    from attncore.abstract import AttentionBackend
    from attncore.builder.persistent.step_metadata import StepMetadata
    from attncore.replay.results.measurements import Verification
    from attncore.replay.scheduling.step import Step
    from attncore.replay.settings import Settings
    from attncore.replay.traces.trace import Request


class AttentionLayers:
    """``num_layers`` layers fed with ``content``. Importing this module needs no torch, using it does.

    ``backend`` is what a MetadataBuilder takes: one, or one for each KV-cache group by name, among which the layers are
    dealt in turn; ``windows`` are the groups' sliding windows. Raises ValueError beginning with ``num_blocks`` where
    the caches do not fit in memory.
    """

    attn_type = "decoder"
    num_caches = 1
    """Caches of each layer."""

    def __init__(
        self,
        backend: AttentionBackend | Mapping[str, AttentionBackend],
        content: Content,
        num_layers: int,
        num_blocks: int,
        windows: Mapping[str, int | None] | None = None,
    ) -> None:
        import torch

        self.keeps_states = False
        self.backend: AttentionBackend | Mapping[str, AttentionBackend] | None = backend
        self.content = content
        by_group: list[tuple[str | None, AttentionBackend]] = (
            list(backend.items()) if isinstance(backend, Mapping) else [(None, backend)]
        )
        self.of_layer: list[tuple[str | None, AttentionBackend]] = [
            by_group[i % len(by_group)] for i in range(num_layers)
        ]
        self.windows = [windows.get(name) if windows and name else None for name, _ in self.of_layer]
        first = by_group[0][1]
        self.name, self.dtype, self.device = first.name, first.config.dtype, first.config.device
        self.impls = [
            one.impl(f"layers.{layer}", scale=content.scale, sliding_window=window, attn_type=self.attn_type)
            for layer, ((_, one), window) in enumerate(zip(self.of_layer, self.windows, strict=True))
        ]
        try:
            caches = [[one.allocate_kv_cache(num_blocks) for _ in range(self.num_caches)] for _, one in self.of_layer]
        except (RuntimeError, MemoryError) as error:  # torch raises the first
            blocks = " or ".join(str(one.config.block_size) for one in dict(by_group).values())
            raise ValueError(
                f"num_blocks: no memory for {counted(num_layers * self.num_caches, 'cache')} of "
                f"{counted(num_blocks, 'block')} of {blocks} ({str(error).splitlines()[0][:120]}); pass a smaller "
                "--num-blocks"
            ) from error
        self.kv_caches: list[Any] = [of_layer[0] if self.num_caches == 1 else of_layer for of_layer in caches]
        self._dtype = getattr(torch, self.dtype)
        self._inference_mode = torch.inference_mode

    @property
    def num_layers(self) -> int:
        return len(self.impls)

    def check(self, requests: Sequence[Request], settings: Settings, result: Verification) -> AttentionCheck:
        """What compares a sample of requests with dense attention."""
        return AttentionCheck(self.content, self.windows, self.dtype, requests, settings, result)

    def forward(self, step: Step, *ranks: StepMetadata) -> tuple[list[Tensor], int]:
        """Each layer's output ``(num_tokens, num_heads, head_size)``, and the nanoseconds that all layers took.

        ``ranks`` is the metadata, one for each rank. Positions are the first's, as in an engine: where they are wrong,
        so is what comes out.
        """
        positions = ranks[0].host.positions
        ids = step_content(step, ranks[0])
        outputs, elapsed, what = [], 0, f"attention: a step of {counted(len(ids), 'token')}"
        with memory_error_as_model_error(what, SMALLER_STEPS), self._inference_mode():
            for layer, (group, backend) in enumerate(self.of_layer):
                tokens = [
                    backend.from_host(part).to(self._dtype) for part in self.content.tokens(ids, positions, layer)
                ]
                of_group = [metadata if group is None else metadata.groups[group] for metadata in ranks]
                start = perf_counter_ns()
                outputs.append(self.attend(layer, tokens, of_group))
                elapsed += perf_counter_ns() - start
        return outputs, elapsed

    def attend(self, layer: int, tokens: list[Tensor], ranks: list[StepMetadata]) -> Tensor:
        """One layer's output for query, key and value ``tokens``; ``ranks`` is the metadata of the layer's group."""
        (query, key, value), [metadata] = tokens, ranks
        return self.impls[layer].forward(query, key, value, self.kv_caches[layer], metadata)


@contextmanager
def torch_threads(count: int) -> Iterator[None]:
    """torch computes with ``count`` threads meanwhile.

    Replay's default is 1: a decode step is many small operations, whose threads wait for each other longer than they
    compute, much longer on a busy machine; and sums come out the same however many cores there are.
    """
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
