"""FlashAttention 3 over latent rows (MLA): one layer's calls, in which every query head reads one row a token.

To the kernel the rotated columns, the last of a row, are keys, and the columns before them both keys and values: their
part of the queries is an argument of its own, ``q_v``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from attn_flash import generation3
from attn_flash.generation2 import given_caches
from attn_flash.generation3 import OUTPUT, Library, StepArguments
from attn_flash.segments import Segment
from attn_flash.spec import LATENT_ROW, LATENT_VALUES, LATENT_WORKSPACE

_SIZES = LATENT_VALUES, LATENT_ROW - LATENT_VALUES
_TILE = 64
"""Query heads of a row's tokens that a core takes at a time, and keys."""


class LatentLayer(generation3.Layer):
    """The calls of one layer. Keys, of a step and of ``caches``, are the rows, which hold the values too: what is given
    as values is not read. Queries have as many columns as a row, outputs as many as the values.

    ``num_heads`` is that of the queries, ``cores`` the device's multiprocessors. The partial outputs of a row's parts,
    float32, take LATENT_WORKSPACE bytes at most: left alone, the library makes room for about as many parts as there
    are cores, 4 GiB for 256 rows of 128 heads.
    """

    def __init__(self, library: Library, *, num_heads: int, cores: int, **given: Any) -> None:
        super().__init__(library, **given)
        self._num_heads, self._cores = num_heads, cores

    def _splits(self, segment: Segment) -> int:
        """The parts at most that a row of a segment is split into; 0: as many as the library counts. It splits none
        where the longest query has tiles for most cores, or there are at most 4 tiles of keys, and makes no more parts
        than there are cores or tiles of keys.
        """
        queries, keys = -(-segment.max_query_len * self._num_heads // _TILE), -(-segment.max_seq_len // _TILE)
        most = LATENT_WORKSPACE // (4 * LATENT_VALUES * self._num_heads * max(1, segment.stop - segment.start))
        return 0 if queries >= 0.8 * self._cores or keys <= 4 or most >= min(keys, self._cores) else max(1, most)

    def _call(
        self,
        segment: Segment,
        arguments: StepArguments,
        caches: tuple[Tensor, Tensor] | None,
        wanted: int | slice = OUTPUT,
    ) -> Callable[[Tensor, Any, Any], Any]:
        forward, last = self._library.forward, (self._splits(segment), *self._last[1:])
        rest = (*arguments.given, None, None, None, *self._fixed)
        if segment.entry == "packed":

            def packed(query: Tensor, key: Any, value: Any) -> Any:
                (key,) = segment.packed_keys(key)
                (values, keys), (content, rotated) = (part.split_with_sizes(_SIZES, 2) for part in (key, query))
                return forward(rotated, keys, values, None, None, content, None, *rest, None, *last)[wanted]

            return packed
        rows = given_caches(caches)[0]
        values, keys = rows.split_with_sizes(_SIZES, 3)
        schedule = self._scheduler(segment, (keys, values), arguments, last)

        def paged(query: Tensor, key: Any, value: Any) -> Any:
            content, rotated = query.split_with_sizes(_SIZES, 2)  # one call for both: each costs the host a microsecond
            written = None if schedule is None else schedule(rotated)
            return forward(rotated, keys, values, None, None, content, None, *rest, written, *last)[wanted]

        return paged
