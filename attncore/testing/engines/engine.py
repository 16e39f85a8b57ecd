"""A small engine around the backend under test: requests, a pool of blocks, one layer and its cache.

The output of every step is compared with dense float32 attention over the requests' histories, and the cache with what
the step may change.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from attncore.builder import CommonMetadataBuilder, MetadataBuilder, Sequence, SequenceGroup
from attncore.dense import dense_attention
from attncore.testing.engines.compare import StepRequest, close, compare, compare_cache, compare_lse, differs
from attncore.testing.engines.given_caches import MakeCache, allocated
from attncore.testing.engines.left_alone import check_plain
from attncore.testing.engines.likely_cause import NOT_OF_DENSE, likely_cause
from attncore.testing.engines.metadata_snapshot import MetadataSnapshot
from attncore.testing.engines.random_tensors import FP8, RandomTensors
from attncore.testing.engines.requests import History, Requests, require_blocks
from attncore.testing.engines.steps_on_device import padded, planned, reads_page_lists
from attncore.testing.engines.tolerances import tolerance
from attncore.testing.harness.declared_samples import of_heads
from attncore.testing.harness.errors import ConformanceError, may_be_refused

if TYPE_CHECKING:
    import numpy.typing as npt

    from attncore.abstract import AttentionBackend, SpecFacts
    from attncore.builder import CommonAttentionMetadata

NUM_BLOCKS, NUM_TOKENS = 48, 192  # a cache has room for at least so many
MOST_LONGEST = 64  # a step has room for so many requests of the greatest length
JUNK = 7.0  # a finite number that no key or value comes near: reading it shows, and no kernel fails on it
PADDING = -5.0  # of rows of padding where the junk is NaN: a write of it to a slot that holds no token shows
OF_GROUPS = (
    "; the step is the list builder's (metadata.from_groups): prompts come first, plain prompts have no table, and "
    "decodes behind a window a table and lengths of the window alone"
)


class Engine(Requests):
    """Runs steps of one layer through ``backend`` and checks each.

    ``features`` are what ``backend.impl`` takes (the scale has a default). Before every step, all slots that no request
    owns are filled with ``junk``, and so are unused slots of last blocks unless the spec says ``finite_tail``. Keys and
    values lie on a grid of numbers that any cache holds exactly (``grid``; by default where the cache has a dtype of
    its own). Rows of query, key and value beyond the tokens of requests hold NaN, or PADDING where the junk is NaN.
    With ``with_lse`` the layer is asked for its log-sum-exp, too. ``cache`` makes the layer's cache. Rows of up to
    ``decode_threshold`` tokens are decodes.

    A new engine makes the backend forget the layers of the engines before it, so that plans are made for its own.
    """

    causal = True

    def __init__(
        self,
        backend: AttentionBackend,
        *,
        num_blocks: int | None = None,
        junk: float = JUNK,
        seed: int = 0,
        grid: bool | None = None,
        with_lse: bool = False,
        cache: MakeCache = allocated,
        decode_threshold: int = 1,
        **features: Any,
    ) -> None:
        config = backend.config
        self.backend, self.config = backend, config
        self.declared_length = None if config.spec is None else config.spec.max_model_len
        num_blocks = num_blocks or max(NUM_BLOCKS, NUM_TOKENS // config.block_size)
        require_blocks(None if config.spec is None else config.spec.max_block_id, num_blocks)
        self.features: dict[str, Any] = {
            "scale": config.head_size**-0.5,
            **of_heads(features, config.num_heads),
        }
        backend.forget_layers()
        self.impl = backend.impl("layers.0", **self.features)
        self.random = np.random.default_rng(seed)
        self.grid = config.kv_cache_dtype not in ("auto", config.dtype) if grid is None else grid
        self.drawn = RandomTensors(config, self.features, self.random, seed, on_grid=self.grid)
        no_tokens = History(self.drawn.draw(0, "key"), self.drawn.draw(0, "value"))
        super().__init__(num_blocks, config.block_size, self.random, no_tokens)
        self.kv_cache, self.cache_view, self._check_memory = cache(backend, num_blocks)
        self.junk, self.with_lse = junk, with_lse
        self.has_padding = False  # whether tensors of the last step had rows of padding
        self.lse: Tensor | None = None  # of the last call
        self.finite_tail = config.spec is not None and config.spec.finite_tail
        self.phases = ("prefill", "decode") if config.spec is None else config.spec.phases
        self.tolerance = tolerance(config.dtype, config.kv_cache_dtype)
        self.builder = MetadataBuilder(
            self.batch, max_num_batched_tokens=MOST_LONGEST * self.batch.max_model_len,
            decode_threshold=decode_threshold,
        )  # fmt: skip
        self.max_error = 0.0
        self.siblings: list[tuple[str, Mapping[str, Any]]] = []  # other layers of the same steps: name, features
        self.cache_dtype = FP8.get(config.kv_cache_dtype, torch.float32)
        self.earlier_scales: Mapping[str, Any] = {}  # where set_scales was called
        self.suspects: list[tuple[str, Mapping[Hashable, History]]] = []  # what likely_cause tries: words, keys
        self.unpadded: CommonAttentionMetadata | None = None  # the step that runs without its rows of padding

    # Steps.

    def fill(self, contexts: Mapping[Any, int]) -> None:
        """Compute the first tokens of requests: in one chunk, or token by token where the backend only decodes."""
        left = {name: length for name, length in contexts.items() if length}
        while left:
            chunk = left if "prefill" in self.phases else dict.fromkeys(left, 1)
            self.step(chunk)
            left = {name: length - chunk[name] for name, length in left.items() if length > chunk[name]}

    def step(
        self,
        scheduled: Mapping[Any, int],
        *,
        pad_reqs: int = 0,
        pad_tokens: int = 0,
        extra: int = 0,
        pad_seq_len: int = 0,
    ) -> Tensor:
        """Run a step of the persistent builder for ``scheduled`` alone; padded as for a captured graph where asked.

        ``extra`` is the number of tokens that tensors have beyond the metadata's. Returns the output on the host.
        """
        step = self.builder.build(self.scheduled(dict(scheduled)))
        requests = [StepRequest(name, scheduled[name], self.context(name)) for name in step.req_ids]
        given: CommonAttentionMetadata = step
        if pad_reqs or pad_tokens:
            given = padded(step, step.num_reqs + pad_reqs, step.num_tokens + pad_tokens, pad_seq_len)
        self.unpadded = None if given is step else step
        return self.run_step(planned(self.backend, given), requests, extra=extra)

    def list_step(
        self,
        prompts: Mapping[Any, int],
        decodes: Mapping[Any, int],
        *,
        hit: bool = False,
        pad: int = -1,
        profiling: bool = False,
    ) -> Tensor:
        """Run a step of the list builder: tokens by request, prompts first; padded by ``pad`` requests from 0 up.

        The blocks are those of the persistent batch, which does not hear of the step: a request that runs such a step
        takes part in no step of the persistent builder afterwards. RefusedStepError where the backend refuses it.
        """
        builder = CommonMetadataBuilder(
            self.block_size,
            _layout(self.config.spec, decodes),
            sliding_window=self.features.get("sliding_window"),
            chunked_prefill=any(self.context(name) for name in prompts) and not hit,
            max_seq_len_to_capture=self.num_blocks * self.block_size,
        )
        groups: list[SequenceGroup] = []
        requests: list[StepRequest] = []
        for is_prompt, members in ((True, prompts), (False, decodes)):
            for name, count in members.items():
                context = self.context(name)
                table = None if profiling else self.batch.block_ids(name)
                sequence = Sequence(len(requests), count, context, table)
                groups.append(SequenceGroup(is_prompt, [sequence], is_prompt and hit))
                requests.append(StepRequest(name, count, context))
        with may_be_refused():
            metadata = planned(self.backend, builder.build(groups, pad))
            self.unpadded = builder.build(groups) if pad > 0 else None
            return self.run_step(metadata, requests, profiling=profiling)

    def run_step(
        self,
        metadata: CommonAttentionMetadata,
        requests: list[StepRequest],
        *,
        extra: int = 0,
        profiling: bool = False,
        slots: npt.NDArray[np.int64] | None = None,
    ) -> Tensor:
        """Run a planned step with random tensors; check the output (not of a ``profiling`` run) and the cache.

        ``slots`` are what is written: the host's, unless those of the device differ.
        """
        tensors = self.drawn.query_key_value(len(metadata.host.slot_mapping) + extra)
        self.fill_padding(tensors, sum(one.tokens for one in requests))
        expected = self.expected(tensors, requests)
        answer = self.checked_forward(tensors, metadata, metadata.host.slot_mapping if slots is None else slots)
        if not profiling:
            self.compare(answer, expected, requests, tensors[0], (tensors, metadata))
        return answer

    def _when_repeated(
        self, step: tuple[tuple[Tensor, Tensor, Tensor], CommonAttentionMetadata],
        expected: list[tuple[Tensor, Tensor]], requests: list[StepRequest],
    ) -> str:  # fmt: skip
        tensors, metadata = step
        try:
            self._compare(self.forward(self.on_device(tensors), metadata).cpu(), expected, requests)
        except Exception:
            return ""
        return "; it is right when forward is called again: something of an earlier step or call was kept"

    def _when_unpadded(
        self, tensors: tuple[Tensor, Tensor, Tensor], expected: list[tuple[Tensor, Tensor]],
        requests: list[StepRequest],
    ) -> str:  # fmt: skip
        if self.unpadded is None:
            return ""
        try:
            answer = self.forward(self.on_device(tensors), planned(self.backend, self.unpadded))
            self._compare(answer.cpu(), expected, requests)
        except Exception:
            return ""
        return "; it is right without the rows of padding, whose slots are -1: they must not change rows of requests"

    def expected(
        self, tensors: tuple[Tensor, Tensor, Tensor], requests: Iterable[StepRequest]
    ) -> list[tuple[Tensor, Tensor]]:
        """The output and log-sum-exp of each request, whose keys and values of this step join its history."""
        found, start = [], 0
        query, key, value = tensors
        for one in requests:
            tokens = slice(start, start + one.tokens)
            self.history[one.name] = self.history[one.name].extended(key[tokens], value[tokens])
            found.append(self.dense(query[tokens], *self.history[one.name]))
            start += one.tokens
        return found

    def checked_forward(
        self,
        tensors: tuple[Tensor, Tensor, Tensor],
        metadata: CommonAttentionMetadata,
        slots: npt.NDArray[np.int64],
    ) -> Tensor:
        """The output, on the host, for query, key and value on the host.

        ConformanceError unless the cache changed at ``slots`` (-1 apart) and nowhere else, the tensors and the metadata
        did not change, and the results are plain tensors, the output of the shape and dtype that it must have.
        """
        self.fill_unowned()
        before = self.cache_view.snapshot()
        dtype = getattr(torch, self.config.dtype)
        given = self.on_device(tensors)
        fields = MetadataSnapshot(metadata)
        answer = self.called(given, metadata)
        fields.check("forward")
        self.check_cache(before, slots)
        for name, tensor, original in zip(("query", "key", "value"), given, tensors, strict=True):
            if differs(tensor.cpu(), original.to(dtype)):
                raise ConformanceError(f"forward changed its argument {name}; an engine may still need it")
        shape = torch.Size((*tensors[0].shape[:2], tensors[2].shape[2]))
        if (answer.shape, answer.dtype) != (shape, dtype):
            raise ConformanceError(f"forward gave {answer.dtype} {tuple(answer.shape)}, not {(shape, dtype)}")
        return answer

    def check_cache(self, before: list[Tensor], slots: npt.NDArray[np.int64]) -> None:
        """ConformanceError unless the cache changed since ``before`` at ``slots`` (-1 apart), which are now written."""
        self._check_memory()
        masked = self.has_padding or bool((slots < 0).any())
        slots = slots[slots >= 0]
        compare_cache(self.cache_view, before, slots, masked=masked)
        self.written[slots // self.block_size, slots % self.block_size] = True

    def compare(
        self, answer: Tensor, expected: list[tuple[Tensor, Tensor]], requests: list[StepRequest], query: Tensor,
        step: tuple[tuple[Tensor, Tensor, Tensor], CommonAttentionMetadata] | None = None,
    ) -> None:  # fmt: skip
        """ConformanceError unless the requests' output, and log-sum-exp where asked for, is what was expected; it names
        the likely cause. The layer is called again for that, where its ``step`` (tensors, metadata) is given."""
        try:
            self._compare(answer, expected, requests)
        except ConformanceError as error:
            lse = None if self.lse is None else self.lse.cpu()
            cause = likely_cause(self, query, answer, lse, expected, requests)
            if not cause and step is not None:
                cause = self._when_repeated(step, expected, requests) or self._when_unpadded(
                    step[0], expected, requests
                )
                cause = cause or (OF_GROUPS if step[1].from_groups else "")
            cause += self._mistake(answer, expected, requests, query)
            raise ConformanceError(f"{error}{cause}", error.max_error) from None

    def mistakes(self, query: Tensor, one: StepRequest) -> Iterable[tuple[str, Tensor]] | None:
        """What is wrong with the feature that an engine is about alone: in words, and the output of the request's
        tokens then. None where the request has nothing of that feature."""
        return None

    def _mistake(
        self, answer: Tensor, expected: list[tuple[Tensor, Tensor]], requests: list[StepRequest], query: Tensor
    ) -> str:
        """Which of ``mistakes`` the output of the first request with one is; empty: none."""
        start = 0
        for one, (wanted, _) in zip(requests, expected, strict=True):
            tokens = slice(start, start + one.tokens)
            start += one.tokens
            found, mistakes = answer[tokens].float(), self.mistakes(query[tokens], one)
            if mistakes is None or close(found, wanted, self.tolerance):
                continue
            causes = (words for words, output in mistakes if close(found, output, self.tolerance))
            return next((f"; it is as if {words}" for words in causes), "")
        return ""

    def _compare(self, answer: Tensor, expected: list[tuple[Tensor, Tensor]], requests: list[StepRequest]) -> None:
        error = compare(answer, [output for output, _ in expected], requests, self)
        self.max_error = max(self.max_error, error)
        if self.lse is not None:
            compare_lse(self.lse, [lse for _, lse in expected], requests, self)

    def called(self, tensors: Iterable[Tensor], metadata: CommonAttentionMetadata) -> Tensor:
        """The output of ``forward`` on the host; ConformanceError unless its results are plain tensors."""
        method = "forward_with_lse" if self.with_lse else "forward"
        answer = self.forward(tensors, metadata)
        check_plain(answer, method, "an output")
        if self.lse is not None:
            check_plain(self.lse, method, "a log-sum-exp")
        return answer.cpu()

    def forward(self, tensors: Iterable[Tensor], metadata: CommonAttentionMetadata) -> Tensor:
        """The layer's output for query, key and value on the device."""
        query, key, value = tensors
        given = (query, key, None if self.config.use_mla else value, self.kv_cache, metadata)
        if not self.with_lse:
            return self.impl.forward(*given)
        output, self.lse = self.impl.forward_with_lse(*given)
        return output

    def dense(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """The output and the log-sum-exp that the layer should give, float32."""
        features = {name: given for name, given in self.features.items() if name not in NOT_OF_DENSE}
        return dense_attention(query, key, value, causal=self.causal, return_lse=True, **features)

    def on_device(self, tensors: Iterable[Tensor]) -> list[Tensor]:
        """Copies of tensors on the backend's device, in its dtype."""
        dtype = getattr(torch, self.config.dtype)
        return [tensor.to(self.config.device, dtype, copy=True) for tensor in tensors]

    def fill_padding(self, tensors: Iterable[Tensor], tokens: int) -> None:
        """Fill the rows of tensors behind the first ``tokens``, which an engine hands over with anything."""
        number = math.nan if self.junk == self.junk else PADDING
        self.has_padding = False
        for tensor in tensors:
            tensor[tokens:] = number
            self.has_padding |= tokens < len(tensor)

    def fill_unowned(self) -> None:
        """Fill slots without a token: with junk, or with 0 in blocks of a request where the spec says ``finite_tail``
        and the junk is NaN."""
        empty = ~self.written
        if not self.finite_tail or self.junk == self.junk:
            self.cache_view.fill(empty, self.junk)
            return
        owned = np.zeros(self.num_blocks, dtype=np.bool_)
        owned[[block for block, holders in self.holders.items() if holders]] = True
        self.cache_view.fill(empty & ~owned[:, None], self.junk)
        self.cache_view.fill(empty & owned[:, None], 0.0)


def _layout(spec: SpecFacts | None, decodes: Mapping[Hashable, int]) -> str:
    if any(count > 1 for count in decodes.values()):
        return "flash"
    return "flashinfer" if reads_page_lists(spec) else "common"
