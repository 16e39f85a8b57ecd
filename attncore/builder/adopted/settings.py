"""The checked arguments of AdoptedSteps, and what it asks of its backend's spec."""

from __future__ import annotations

from typing import Any, NamedTuple

from attncore import arguments
from attncore.builder.checked_backend import check_backend
from attncore.builder.device.memory import ALIGNMENT
from attncore.builder.persistent.kv_cache_group import KVCacheGroup
from attncore.show import counted

_WORDS = ALIGNMENT // 4


class Settings(NamedTuple):
    """The arguments of AdoptedSteps, as it documents them, and what follows from them."""

    max_num_reqs: int
    max_num_tokens: int
    max_model_len: int
    num_blocks: int | None
    decode_threshold: int
    depth: int
    block_size: int
    max_pages: int
    """Pages of the longest request."""

    @property
    def blocks_bound(self) -> int:
        """Block ids are below it: the cache's blocks, or what int32 counts slots of."""
        return arguments.INT32_MAX // self.block_size if self.num_blocks is None else self.num_blocks

    @property
    def gap(self) -> int:
        """int32 elements between the starts of two arrays of n + 1."""
        return -(-(self.max_num_reqs + 1) // _WORDS) * _WORDS


class Batch(NamedTuple):
    """What a backend asks of the batch of a builder (``metadata.builder.batch``): which blocks there are."""

    groups: tuple[KVCacheGroup, ...]


class Facts(NamedTuple):
    """What a backend's spec says of its steps; of a backend without a spec the least is asked."""

    name: str
    host_lengths: str
    cuda_graph: str
    pad_seq_len: int
    """The least length of a row of a captured size."""
    page_list: bool
    """Whether it reads page indices on the device in every step."""
    plans: bool
    waits_for_last_plan: bool
    """Whether its library plans into one buffer."""
    records: bool
    """Whether a captured size's graph may do all that a step needs on the device: nothing else plans it."""


def check_settings(
    backend: Any, max_num_reqs: int, max_num_tokens: int, max_model_len: int, num_blocks: int | None,
    decode_threshold: int, depth: int,
) -> Settings:  # fmt: skip
    """The settings as plain ints; ValueError or TypeError that names the argument."""
    check_backend(backend)
    block_size = backend.config.block_size
    max_num_reqs = arguments.integer("max_num_reqs", max_num_reqs, 1)
    # The last page of the longest request, and one more, are counted in int32 on the device.
    max_model_len = arguments.integer("max_model_len", max_model_len, 1, arguments.INT32_MAX - 2 * block_size)
    max_pages = -(-max_model_len // block_size)
    if max_num_reqs * max_pages > arguments.INT32_MAX:
        raise ValueError(
            f"max_num_reqs: {counted(max_num_reqs, 'request')} of {counted(max_pages, 'page')} each are more page "
            "indices than int32 counts; "
            "lower it, or max_model_len"
        )
    return Settings(
        max_num_reqs,
        arguments.integer("max_num_tokens", max_num_tokens, 1),
        max_model_len,
        arguments.optional_integer("num_blocks", num_blocks, 1),
        arguments.integer("decode_threshold", decode_threshold, 1),
        arguments.integer("depth", depth, 1, 64),
        block_size,
        max_pages,
    )


def facts_of(backend: Any) -> Facts:
    """What the backend asks of steps."""
    spec, name, plans = backend.spec, backend.name, backend.has_plan
    records = not plans or bool(backend.records_plan)
    if spec is None:
        return Facts(
            name, "none", "always", 0, page_list=False, plans=plans, waits_for_last_plan=plans, records=records
        )
    return Facts(
        name,
        spec.host_lengths,
        spec.cuda_graph,
        spec.pad_seq_len,
        page_list="paged_kv_indices" in spec.device_needs,
        plans=plans,
        waits_for_last_plan=plans and spec.plan_staging == "shared",
        records=records,
    )
