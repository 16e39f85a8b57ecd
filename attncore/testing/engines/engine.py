"""A small engine around the backend under test: requests that remember all they have said, a pool of blocks, a cache.

Every step is compared with dense float32 attention over what was said, and the cache with what the step may change.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from attncore.builder import CommonMetadataBuilder, InputBatch, MetadataBuilder, Sequence, SequenceGroup
from attncore.dense import dense_attention
from attncore.testing.engines import steps
from attncore.testing.engines.compare import Row, compare, compare_cache, compare_lse, differs
from attncore.testing.engines.pages import Pages
from attncore.testing.engines.tolerances import tolerance
from attncore.testing.kit.errors import ConformanceError

if TYPE_CHECKING:
    from attncore.abstract import AttentionBackend

NUM_BLOCKS, NUM_TOKENS = 48, 192  # a cache has room for at least so many
GARBAGE = 7.0  # a finite number that no key or value comes near: reading it shows, and no kernel chokes on it
BACKENDS_OWN = ("k_scale", "v_scale", "attn_type")  # features of a layer that dense attention takes otherwise
PADDING = -5.0  # not what unowned slots hold, so that a write to one of them shows
GRID = (-2.0, -1.5, -1.0, -0.5, 0.5, 1.0, 1.5, 2.0)  # exact in every dtype of a cache, times a scale that is 2**n


class Engine:
    """Runs steps of one layer through ``backend`` and checks each.

    ``features`` are what ``backend.impl`` takes (the scale has a default). Before every step, all that no request owns
    is filled with ``junk``, and so are unused rows of last pages unless the spec says ``finite_tail``. Keys and values
    lie on a ``grid`` of numbers that any cache holds exactly, by default where the cache has a dtype of its own. With
    ``with_lse`` the layer is asked for its log-sum-exp, too.
    """

    causal = True

    def __init__(
        self,
        backend: AttentionBackend,
        *,
        num_blocks: int | None = None,
        junk: float = GARBAGE,
        seed: int = 0,
        grid: bool | None = None,
        with_lse: bool = False,
        **features: Any,
    ) -> None:
        config = backend.config
        self.backend, self.config = backend, config
        self.features: dict[str, Any] = {"scale": config.head_size**-0.5, **features}
        backend.forget_layers()  # the layers of another test's engine are gone
        self.impl = backend.impl("layers.0", **self.features)
        num_blocks = num_blocks or max(NUM_BLOCKS, NUM_TOKENS // config.block_size)
        self.num_blocks, self.block_size = num_blocks, config.block_size
        self.kv_cache = backend.allocate_kv_cache(num_blocks)
        self.pages = Pages(backend, self.kv_cache, num_blocks)
        self.junk, self.with_lse = junk, with_lse
        self.grid = config.kv_cache_dtype not in ("auto", config.dtype) if grid is None else grid
        self.finite_tail = config.spec is not None and config.spec.finite_tail
        self.phases = ("prefill", "decode") if config.spec is None else config.spec.phases
        self.window: int | None = self.features.get("sliding_window")
        self.tolerance = tolerance(config.dtype, config.kv_cache_dtype)
        self.random = np.random.default_rng(seed)
        self.torch_random = torch.Generator().manual_seed(seed)
        self.free = [int(block) for block in self.random.permutation(np.arange(1, num_blocks))]
        self.batch = InputBatch(
            max_num_reqs=64, max_model_len=num_blocks * self.block_size, block_size=self.block_size,
            num_blocks=num_blocks,
        )  # fmt: skip
        self.builder = MetadataBuilder(self.batch, max_num_batched_tokens=64 * num_blocks * self.block_size)
        self.said: dict[Any, tuple[Tensor, Tensor]] = {}
        self.shared: dict[int, int] = {}  # block -> requests that hold it
        self.written = np.zeros((num_blocks + 1, self.block_size), dtype=np.bool_)
        self.max_error = 0.0

    # The life of a request.

    def add(self, name: Any, tokens: int, *, prefix_of: Any = None, prefix_blocks: int = 0) -> None:
        """A request with blocks for ``tokens`` tokens, its first ``prefix_blocks`` those of another (a prefix hit)."""
        shared = self.batch.block_ids(prefix_of)[:prefix_blocks] if prefix_blocks else []
        own = [self.free.pop() for _ in range(-(-tokens // self.block_size) - len(shared))]
        for block in (*shared, *own):
            self.shared[block] = self.shared.get(block, 0) + 1
        computed = len(shared) * self.block_size
        self.batch.add_request(name, [*shared, *own], computed)
        empty = (self._heads(0, "kv"), self._heads(0, "v"))
        self.said[name] = (
            tuple(part[:computed].clone() for part in self.said[prefix_of]) if computed else empty  # type: ignore[assignment]
        )

    def remove(self, name: Any) -> None:
        """The request leaves; blocks that nobody else holds go back to the pool."""
        for block in self.batch.remove_request(name):
            self.shared[block] -= 1
            if not self.shared[block]:
                self.written[block] = False
                self.free.insert(0, block)
        del self.said[name]

    def grow(self, name: Any) -> None:
        """A block more for the request where its next token has none."""
        if name in self.batch.needs_block():
            block = self.free.pop()
            self.shared[block] = self.shared.get(block, 0) + 1
            self.batch.append_blocks(name, [block])

    def replace(self, name: Any, index: int, block: int) -> None:
        """The request holds ``block``, a copy, in place of its block number ``index``, which nobody holds any more."""
        tokens, blocks = self.batch.num_computed_tokens(name), self.batch.remove_request(name)
        old, blocks[index] = blocks[index], block
        self.shared[block] = self.shared.pop(old)
        self.written[block], self.written[old] = self.written[old].copy(), False
        self.free.insert(0, old)
        self.batch.add_request(name, blocks, tokens)

    def fill(self, contexts: Mapping[Any, int]) -> None:
        """Compute the first tokens of requests: in one chunk, or token by token where the backend runs decodes only."""
        left = {name: length for name, length in contexts.items() if length}
        while left:
            chunk = left if "prefill" in self.phases else dict.fromkeys(left, 1)
            self.step(chunk)
            left = {name: length - chunk[name] for name, length in left.items() if length > chunk[name]}

    # Steps.

    def step(
        self,
        scheduled: Mapping[Any, int],
        *,
        pad_reqs: int = 0,
        pad_tokens: int = 0,
        extra: int = 0,
        pad_seq_len: int = 0,
    ) -> Tensor:
        """A step of the persistent door, of ``scheduled`` only; padded as for a captured graph where asked.

        ``extra`` is the number of tokens that tensors have beyond the metadata's. Returns the output on the host.
        """
        names = dict.fromkeys(self.batch.req_ids, 0)
        step = self.builder.build({**names, **scheduled})
        rows = [Row(name, scheduled[name], len(self.said[name][0])) for name in step.req_ids]
        given: Any = step
        if pad_reqs or pad_tokens:
            given = steps.padded(step, step.num_reqs + pad_reqs, step.num_tokens + pad_tokens, pad_seq_len)
        return self._run(steps.planned(self.backend, given), rows, extra=extra)

    def list_step(
        self,
        prompts: Mapping[Any, int],
        decodes: Mapping[Any, int],
        *,
        hit: bool = False,
        pad: int = -1,
        profiling: bool = False,
    ) -> Tensor:
        """A step of the list door: tokens by request, prompts first; padded by ``pad`` requests from 0 up.

        The batch of the persistent door only lends its blocks here, so that a request of this door stays in it.
        """
        builder = CommonMetadataBuilder(
            self.block_size,
            _layout(self.config.spec, decodes),
            sliding_window=self.window,
            chunked_prefill=any(len(self.said[name][0]) for name in prompts) and not hit,
            max_seq_len_to_capture=self.num_blocks * self.block_size,
        )
        groups: list[SequenceGroup] = []
        rows: list[Row] = []
        for is_prompt, members in ((True, prompts), (False, decodes)):
            for name, count in members.items():
                context = len(self.said[name][0])
                table = None if profiling else self.batch.block_ids(name)
                groups.append(SequenceGroup(is_prompt, [Sequence(len(rows), count, context, table)], is_prompt and hit))
                rows.append(Row(name, count, context))
        return self._run(steps.planned(self.backend, builder.build(groups, pad)), rows, profiling=profiling)

    def _run(self, metadata: Any, rows: list[Row], *, extra: int = 0, profiling: bool = False) -> Tensor:
        total = len(metadata.host.slot_mapping) + extra
        query, key, value = self.tensors(total)
        if not self.finite_tail:
            for tensor in (query, key, value):  # what an engine feeds in for padding is anything
                tensor[sum(row.tokens for row in rows) :] = PADDING if self.junk == self.junk else self.junk
        expected, start = [], 0
        for row in rows:
            tokens = slice(start, start + row.tokens)
            said = [torch.cat((old, new[tokens])) for old, new in zip(self.said[row.name], (key, value), strict=True)]
            self.said[row.name] = (said[0], said[1])
            expected.append(self.dense(query[tokens], *said))
            start += row.tokens
        answer = self.checked((query, key, value), metadata, metadata.host.slot_mapping)
        if not profiling:
            self.compare(answer, expected, rows)
        return answer

    def checked(self, tensors: tuple[Tensor, Tensor, Tensor], metadata: Any, slots: Any) -> Tensor:
        """The output, on the host, of query, key and value on the host; the cache must have changed at ``slots`` (but
        -1) alone, and the tensors not."""
        self._poison()
        before = self.pages.snapshot()
        config, dtype = self.config, getattr(torch, self.config.dtype)
        given = [tensor.to(config.device, dtype, copy=True) for tensor in tensors]
        answer = self.forward(given, metadata).cpu()
        slots = slots[slots >= 0]
        compare_cache(self.pages, before, slots)
        self.written[slots // self.block_size, slots % self.block_size] = True
        for name, tensor, original in zip(("query", "key", "value"), given, tensors, strict=True):
            if differs(tensor.cpu(), original.to(dtype)):
                raise ConformanceError(f"forward changed its argument {name}; an engine may still need it")
        shape = torch.Size((*tensors[0].shape[:2], tensors[2].shape[2]))
        if (answer.shape, answer.dtype) != (shape, dtype):
            raise ConformanceError(f"forward gave {answer.dtype} {tuple(answer.shape)}, not {(shape, dtype)}")
        return answer

    def compare(self, answer: Tensor, expected: list[tuple[Tensor, Tensor]], rows: list[Row]) -> None:
        """ConformanceError unless the rows' output, and log-sum-exp where asked for, is what was expected."""
        error = compare(answer, [output for output, _ in expected], rows, self)
        self.max_error = max(self.max_error, error)
        if self.with_lse:
            compare_lse(self.lse, [lse for _, lse in expected], rows, self)

    def tensors(self, count: int) -> tuple[Tensor, Tensor, Tensor]:
        """Random query, key and value of ``count`` tokens, float32, on the host; latent values are part of the keys."""
        query, key = self._heads(count, "q"), self._heads(count, "kv")
        if self.config.use_mla:
            return query, key, key[..., : self.config.head_size_v].clone()
        return query, key, self._heads(count, "v")

    def forward(self, tensors: Iterable[Any], metadata: Any) -> Tensor:
        """The layer's output, of query, key and value on the device."""
        query, key, value = tensors
        given = (query, key, None if self.config.use_mla else value, self.kv_cache, metadata)
        if not self.with_lse:
            return self.impl.forward(*given)
        output, self.lse = self.impl.forward_with_lse(*given)
        return output

    def dense(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """The output and the log-sum-exp that the layer should give, float32."""
        features = {name: part for name, part in self.features.items() if name not in BACKENDS_OWN}
        return dense_attention(query, key, value, causal=self.causal, return_lse=True, **features)

    def _poison(self) -> None:
        """Fill what holds no token: blocks of nobody with junk, unused rows with junk or, for ``finite_tail``, 0."""
        empty = ~self.written
        if not self.finite_tail or self.junk == self.junk:
            self.pages.fill(empty, self.junk)
            return
        owned = np.zeros(self.num_blocks + 1, dtype=np.bool_)
        owned[[block for block, holders in self.shared.items() if holders]] = True
        self.pages.fill(empty & ~owned[:, None], self.junk)
        self.pages.fill(empty & owned[:, None], 0.0)

    def _heads(self, count: int, kind: str) -> Tensor:
        """Random tensors of ``count`` tokens, as the backend gets them: float32 values that are exact in its dtype."""
        config = self.config
        size = (config.head_size_v or config.head_size) if kind == "v" else config.head_size
        shape = (count, config.num_heads if kind == "q" else config.num_kv_heads, size)
        if kind != "q" and self.grid:
            # Exact in the cache too, so that it does not matter whether a kernel reads fresh keys or cached ones.
            drawn = torch.from_numpy(self.random.choice(np.array(GRID, dtype=np.float32), shape))
            return drawn * float(self.features.get("v_scale" if kind == "v" else "k_scale", 1.0))
        drawn = torch.randn(shape, generator=self.torch_random) * (1.5 if kind == "q" else 1.0)
        return drawn.to(getattr(torch, config.dtype)).float()


def _layout(spec: Any, decodes: Mapping[Any, int]) -> str:
    if any(count > 1 for count in decodes.values()):
        return "flash"
    return "flashinfer" if spec is not None and "page_list" in spec.needs else "common"


def run_rows(engine: Engine, rows: Iterable[tuple[int, int]]) -> Tensor:
    """Requests of (context, tokens of the step): their contexts computed in an earlier step, then the step itself."""
    pairs = list(rows)
    for i, (context, count) in enumerate(pairs):
        engine.add(i, context + count)
    engine.fill({i: context for i, (context, _) in enumerate(pairs)})
    return engine.step({i: count for i, (_, count) in enumerate(pairs)})
