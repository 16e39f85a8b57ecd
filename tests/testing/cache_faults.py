"""Faults of the cache: its shape, copies, and slots written or read in error; each names the test that must find it."""

from testing.faulty_backend import Fault, forward

CONVERTED_ALONE = """
import dataclasses

class Impl(AttentionImpl):
    def forward(self, query, key, value, kv_cache, metadata, output=None, *, write=True):
        plain = [view.float().to(query.dtype) for view in self.backend.kv_cache_views(kv_cache)]
        inner = self.backend.inner.impl(self.layer_name, scale=self.scale)
        answer = inner.forward(query, key, value, plain, metadata, output, write=write)
        if write:
            self.write(key, value, kv_cache, metadata)
        return answer

    write = AttentionImpl.write_cache

def converted(self, key, value, kv_cache, metadata):
    for new, view in zip((key, value), self.backend.kv_cache_views(kv_cache)):
        for token, slot in enumerate(metadata.slot_mapping.tolist()):
            if slot >= 0:
                view[slot // view.shape[1], slot % view.shape[1]] = new[token].to(view.dtype)
Impl.{method} = converted

class Backend(ReferenceBackend):
    impl_class = Impl

    def __init__(self, config):
        AttentionBackend.__init__(self, config)
        self.inner = ReferenceBackend(dataclasses.replace(config, kv_cache_dtype="auto", spec=None))
"""
"""A cache of 8 bits that one of the methods writes without a limit."""
FP8 = "kv_cache_dtypes={'fp8_e4m3', 'fp8_e5m2'}, features=set()"
READ_WITH = """
made = Impl.__init__
def init(self, backend, layer_name, **features):
    made(self, backend, layer_name, **features)
    backend.last = self
Impl.__init__ = init
def written(self, *args, **kwargs):
    requests, step = super(Impl, self)._written(*args, **kwargs)
    return requests, step._replace({scale}={number})
Impl._written = written
"""
"""A cache that is read with another scale than it was written with."""
SCALED = "kv_cache_dtypes={'fp8_e4m3', 'fp8_e5m2'}, features={'kv_scales'}"

CACHE_FAULTS = (
    Fault(
        "writes_minus_one",
        "test_a_slot_below_0_writes_nothing_where_every_block_is_owned",
        "a slot of -1, or a token of padding, writes nothing",
        forward(
            """
answer = whole(query, key, value, kv_cache, metadata, output)
masked = metadata.slot_mapping < 0
if masked.any():
    kv_cache[0, -1, -1] = key[: len(masked)][masked][-1]
return answer
"""
        ),
    ),
    Fault(
        "reads_an_unowned_block",
        "test_nothing_is_read_that_no_request_owns",
        "the output holds NaN",
        forward("return whole(query, key, value, kv_cache, metadata, output) + 0 * kv_cache[0, 0].sum()"),
    ),
    Fault(
        "reads_what_a_window_has_passed",
        "test_nothing_is_read_that_a_window_has_passed[6]",
        "a block that a window has passed",
        forward(
            """
answer = whole(query, key, value, kv_cache, metadata, output)
return answer + 0 * kv_cache[:, metadata.block_table[0, 0].long()].sum()
"""
        ),
    ),
    Fault(
        "reads_a_tile_before_the_window",
        "test_nothing_is_read_that_a_window_has_passed",
        "a block that a window has passed",
        forward(
            """
answer = whole(query, key, value, kv_cache, metadata, output)
if self.sliding_window and metadata.num_decodes:
    length, size = int(metadata.host.seq_lens[0]), kv_cache.shape[2]
    first = max(0, length - self.sliding_window) // 16 * 16 // size
    answer += 0 * kv_cache[:, int(metadata.host.block_table[0, first])].sum()
return answer
"""
        ),
    ),
    Fault(
        "reads_unused_rows",
        "test_nothing_is_read_that_no_request_owns",
        "declares finite_tail",
        forward(
            """
answer = whole(query, key, value, kv_cache, metadata, output)
for row, length in enumerate(metadata.host.seq_lens):
    size = kv_cache.shape[2]
    page = int(metadata.host.block_table[row, (length - 1) // size])
    answer += 0 * kv_cache[:, page].sum()
return answer
"""
        ),
    ),
    Fault(
        "writes_nothing",
        "test_a_slot_owns_its_part_of_its_block",
        "wrote nothing to its block: forward must write the cache",
        forward("return whole(query, key, value, kv_cache.clone(), metadata, output)"),
    ),
    Fault(
        "writes_beside",
        "test_prefill",
        "changed block 0, which it does not own",
        forward(
            """
answer = whole(query, key, value, kv_cache, metadata, output)
if len(query) > 2:
    kv_cache[0, 0, 0] = 1
return answer
"""
        ),
    ),
    Fault(
        "keeps_a_token_by_its_largest_number",
        "test_prefill",
        "a token whose key and value are all 1 and one whose are all 2 look alike there",
        """
def write_cache(self, key, value, kv_cache, metadata):
    whole = super(Impl, self).write_cache
    whole(key / key.abs().amax(-1, True), value / value.abs().amax(-1, True), kv_cache, metadata)
Impl.write_cache = write_cache
"""
        + forward(
            """
answer = whole(query, key, value, kv_cache, metadata, output)
if write:
    self.write_cache(key, value, kv_cache, metadata)
return answer
"""
        ),
    ),
    Fault(
        "copies_in_turn",
        "test_blocks_are_copied_within_caches",
        "block 3 should hold what block 2 held",
        """
def copy_blocks(self, kv_caches, src_to_dst):
    for cache in kv_caches:
        for source, target in src_to_dst:
            cache[:, target] = cache[:, source]
Backend.copy_blocks = copy_blocks
""",
    ),
    Fault(
        "copies_twice_where_two_layers_have_the_cache",
        "test_blocks_are_copied_within_caches",
        "block 3 should hold what block 2 held, in the cache that layers 0, 2 and 3 have together",
        """
def copy_blocks(self, kv_caches, src_to_dst):
    for cache in kv_caches:
        self.swap_blocks(cache, cache, src_to_dst)
Backend.copy_blocks = copy_blocks
""",
    ),
    Fault(
        "copies_twice_where_two_layers_have_the_cache_as_other_tensors",
        "test_blocks_are_copied_within_caches",
        "block 0 should hold what block 5 held, in the cache that layers 0, 2 and 3 have together",
        """
def copy_blocks(self, kv_caches, src_to_dst):
    for cache in {id(cache): cache for cache in kv_caches}.values():
        self.swap_blocks(cache, cache, src_to_dst)
Backend.copy_blocks = copy_blocks
""",
    ),
    Fault(
        "swaps_keys_only",
        "test_blocks_are_swapped_to_another_cache",
        "should hold what block",
        """
def swap_blocks(self, source, target, src_to_dst):
    for a, b in src_to_dst:
        target[0, b] = source[0, a]
Backend.swap_blocks = swap_blocks
""",
    ),
    Fault(
        "a_block_too_many",
        "test_the_cache_is_zeroed_and_has_the_blocks_asked_for",
        "an axis must count the 5 blocks",
        "Backend.allocate_kv_cache = lambda self, n: AttentionBackend.allocate_kv_cache(self, n + 1)",
    ),
    Fault(
        "dirty_cache",
        "test_the_cache_is_zeroed_and_has_the_blocks_asked_for",
        "must give zeros",
        "Backend.allocate_kv_cache = lambda self, n: AttentionBackend.allocate_kv_cache(self, n) + 1",
    ),
    Fault(
        "two_axes",
        "test_the_cache_shape_grows_along_one_axis",
        "one axis must grow",
        "Backend.kv_cache_shape = lambda self, n, size, heads, head_size: (n, n, size, heads, head_size)",
    ),
    Fault(
        "wrong_row",
        "test_decode",
        "decode of 1 after",
        forward(
            "return whole(query, key, value, kv_cache, "
            "changed(metadata, block_table=np.roll(metadata.host.block_table, 1, 0)), output)"
        ),
    ),
    Fault(
        "ids_of_16_bits",
        "test_block_ids_beyond_16_bits",
        "of 1 after",
        forward(
            "return whole(query, key, value, kv_cache, "
            "changed(metadata, block_table=metadata.host.block_table & 0x7FFF), output)"
        ),
    ),
    Fault(
        "short_ids",
        "test_block_ids_at_the_end_of_the_pool",
        "decode of 1 after",
        forward(
            "return whole(query, key, value, kv_cache, "
            "changed(metadata, block_table=metadata.host.block_table % 32), output)"
        ),
    ),
    Fault(
        "beyond_e5m2_becomes_infinite",
        "test_numbers_beyond_an_fp8_cache[fp8_e5m2-forward]",
        "forward wrote inf to the fp8_e5m2 cache for a key of 65000",
        CONVERTED_ALONE.format(method="write"),
        FP8,
    ),
    Fault(
        "beyond_e5m2_becomes_infinite_in_write_cache",
        "test_numbers_beyond_an_fp8_cache[fp8_e5m2-write_cache]",
        "write_cache wrote inf to the fp8_e5m2 cache for a key of 65000",
        CONVERTED_ALONE.format(method="write_cache"),
        FP8,
    ),
    Fault(
        "k_scale_of_another_layer_e4m3",
        "test_rounding_of_an_fp8_cache[fp8_e4m3]",
        "more than a cache of fp8_e4m3 rounds keys and values",
        READ_WITH.format(scale="k_scale", number="self.backend.last.k_scale"),
        SCALED,
    ),
    Fault(
        "k_scale_applied_twice_e4m3",
        "test_rounding_of_an_fp8_cache[fp8_e4m3]",
        "more than a cache of fp8_e4m3 rounds keys and values",
        READ_WITH.format(scale="k_scale", number="self.k_scale ** 2"),
        SCALED,
    ),
    Fault(
        "v_scale_of_another_layer_e4m3",
        "test_rounding_of_an_fp8_cache[fp8_e4m3]",
        "more than a cache of fp8_e4m3 rounds keys and values",
        READ_WITH.format(scale="v_scale", number="self.backend.last.v_scale"),
        SCALED,
    ),
    Fault(
        "v_scale_applied_twice_e4m3",
        "test_rounding_of_an_fp8_cache[fp8_e4m3]",
        "more than a cache of fp8_e4m3 rounds keys and values",
        READ_WITH.format(scale="v_scale", number="self.v_scale ** 2"),
        SCALED,
    ),
    Fault(
        "k_scale_of_another_layer_e5m2",
        "test_rounding_of_an_fp8_cache[fp8_e5m2]",
        "more than a cache of fp8_e5m2 rounds keys and values",
        READ_WITH.format(scale="k_scale", number="self.backend.last.k_scale"),
        SCALED,
    ),
    Fault(
        "k_scale_applied_twice_e5m2",
        "test_rounding_of_an_fp8_cache[fp8_e5m2]",
        "more than a cache of fp8_e5m2 rounds keys and values",
        READ_WITH.format(scale="k_scale", number="self.k_scale ** 2"),
        SCALED,
    ),
    Fault(
        "v_scale_of_another_layer_e5m2",
        "test_rounding_of_an_fp8_cache[fp8_e5m2]",
        "more than a cache of fp8_e5m2 rounds keys and values",
        READ_WITH.format(scale="v_scale", number="self.backend.last.v_scale"),
        SCALED,
    ),
    Fault(
        "v_scale_applied_twice_e5m2",
        "test_rounding_of_an_fp8_cache[fp8_e5m2]",
        "more than a cache of fp8_e5m2 rounds keys and values",
        READ_WITH.format(scale="v_scale", number="self.v_scale ** 2"),
        SCALED,
    ),
    Fault(
        "one_table_for_rows_that_begin_alike",
        "test_a_prefix_shared_by_two_requests",
        "differs",
        forward("""
table = np.array(metadata.host.block_table)
for row in range(1, len(table)):
    if table.shape[1] and table[row, 0] == table[0, 0]:
        table[row] = table[0]
return whole(query, key, value, kv_cache, changed(metadata, block_table=table), output)
"""),
    ),
    Fault(
        "blocks_are_not_copied",
        "test_a_request_reads_a_copied_block",
        "copy_blocks left other keys in block",
        "Backend.copy_blocks = lambda self, kv_caches, src_to_dst: None",
    ),
    Fault(
        "a_window_reads_the_unused_rows",
        "test_nothing_is_read_under_a_window",
        "declares finite_tail",
        forward("""
answer = whole(query, key, value, kv_cache, metadata, output)
for row, length in enumerate(metadata.host.seq_lens if self.sliding_window else ()):
    page = int(metadata.host.block_table[row, (length - 1) // kv_cache.shape[2]])
    answer += 0 * kv_cache[:, page].sum()
return answer
"""),
    ),
)
