"""Head sizes whose keys generation 4 reads rightly from pages. No torch is imported here: the spec is made of them.

On sm_90 it copies pages into tiles of keys with 128 threads, 16 bytes a thread, so many rows at a time as 2,048 bytes
hold of the largest power of two (to 128 bytes) that divides a head's. Where the height of the tile is no multiple of
that, it reads and writes beyond the tile: wrong numbers, or an illegal memory access
(``benchmarks/head_sizes.py``, ``benchmarks/results/gpu/flash_head_sizes_20261122.json`` of attncore).
"""

PAGED = (*range(16, 129, 16), 192, 256)
"""Right with a causal mask, and with a window. Others are refused by the library, or wrong: 144, 160, 176, 208, ..."""

CAUSAL_ONLY = (80, 96)
"""Of these, wrong where every key is seen, whose tile is higher: cross attention, a shared prefix read apart."""
