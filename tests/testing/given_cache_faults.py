"""Faults with caches that an engine hands over or writes by itself; each names the test that must find it."""

from testing.faulty_backend import Fault, forward

READS, PAIR = "test_a_layer_attends_without_writing", "test_a_pair_of_views"
CAPTURED = "test_captured_sizes_without_writing"
STRIDED = "features={'strided_kv_cache', 'lse', 'encoder_decoder'}"
WRITE_CACHE = """
def write_cache(self, key, value, kv_cache, metadata):
    {body}
Impl.write_cache = write_cache
"""

GIVEN_CACHE_FAULTS = (
    Fault(
        "ignores_write",
        f"{READS}[another layer-NaN]",
        "forward with write=False changed the cache",
        forward("return super(Impl, self).forward(query, key, value, kv_cache, metadata, output)"),
    ),
    Fault(
        "knows_no_write",
        f"{READS}[another layer-None]",
        "unexpected keyword argument 'write'",
        """
def forward(self, query, key, value, kv_cache, metadata, output=None):
    return super(Impl, self).forward(query, key, value, kv_cache, metadata, output)
Impl.forward = forward
""",
    ),
    Fault(
        "reads_a_key_that_is_none",
        f"{READS}[the engine-None]",
        "'NoneType' object has no attribute",
        forward("return whole(query, key.contiguous(), value, kv_cache, metadata, output)"),
    ),
    Fault(
        "attends_over_a_key_that_is_not_the_caches",
        f"{READS}[the engine-NaN]",
        "the output holds NaN",
        forward(
            """
if write or key is None:
    return whole(query, key, value, kv_cache, metadata, output)
return super(Impl, self).forward(query, key, value, kv_cache.clone(), metadata, output)
"""
        ),
    ),
    Fault(
        "reads_the_cache_before_the_step",
        f"{READS}[write_cache-None]",
        "differs from dense",
        forward(
            """
if not write:  # as if the step's own keys were still to come
    kv_cache = kv_cache.clone()
    for row, slot in enumerate(metadata.slot_mapping.tolist()):
        kv_cache[:, slot // kv_cache.shape[2], slot % kv_cache.shape[2]] = 0
return whole(query, key, value, kv_cache, metadata, output)
"""
        ),
    ),
    Fault(
        "writes_without_reading",
        f"{READS}[the engine-None]",
        "forward with write=False changed the cache",
        forward(
            """
if not write:
    kv_cache[0, 0, 0] += 1
return whole(query, key, value, kv_cache, metadata, output)
"""
        ),
    ),
    Fault(
        "log_sum_exp_writes",
        "test_log_sum_exp_without_writing",
        "forward_with_lse(..., write=False), whose key and value may be None, where another layer has written",
        forward(
            "return super(Impl, self).forward_with_lse(query, key, value, kv_cache, metadata, output)",
            "forward_with_lse",
        ),
        STRIDED,
    ),
    Fault(
        "cross_layers_need_their_keys",
        "test_a_cross_layer_attends_without_writing[write_cache]",
        "forward(..., write=False), whose key and value may be None, where write_cache has written",
        forward(
            """
if self.attn_type == "encoder_decoder" and metadata.host.encoder_query_start_loc[-1]:
    key = key.contiguous()
return whole(query, key, value, kv_cache, metadata, output)
"""
        ),
        STRIDED,
    ),
    Fault(
        "padded_decodes_write",
        "test_padded_decodes_attend_without_writing",
        "forward with write=False changed the cache",
        forward(
            """
if not write and (metadata.slot_mapping < 0).any():
    kv_cache[0, 0, 0] += 1
return whole(query, key, value, kv_cache, metadata, output)
"""
        ),
    ),
    Fault(
        "writes_in_a_graph",
        f"{CAPTURED}[write_cache-1]",
        "forward with write=False changed the cache, in a captured graph",
        forward(
            """
if metadata.use_cuda_graph and metadata.host.seq_lens.any():
    kv_cache[0, 0, 0] += not write
return whole(query, key, value, kv_cache, metadata, output)
"""
        ),
    ),
    Fault(
        "reads_in_a_graph_before_the_step",
        f"{CAPTURED}[another layer-1]",
        "decode of 1 after",
        forward(
            """
if not write and metadata.use_cuda_graph:  # as if the step's own keys were still to come
    kv_cache = kv_cache.clone()
    for slot in metadata.slot_mapping[metadata.slot_mapping >= 0].tolist():
        kv_cache[:, slot // kv_cache.shape[2], slot % kv_cache.shape[2]] = 0
return whole(query, key, value, kv_cache, metadata, output)
"""
        ),
    ),
    Fault(
        "write_cache_does_nothing_in_a_graph",
        f"{CAPTURED}[write_cache-1]",
        "forward wrote nothing to slot",
        WRITE_CACHE.format(
            body="metadata.use_cuda_graph or super(Impl, self).write_cache(key, value, kv_cache, metadata)"
        ),
    ),
    Fault(
        "prompts_without_a_table_are_read_in_the_cache",
        "test_a_layer_of_the_list_builder_attends_without_writing",
        "prompts have no table here, and bring their keys with write=False too",
        forward(
            """
if not write and metadata.from_groups and metadata.num_prefills:
    size, table = self.backend.config.block_size, metadata.host.block_table
    blocks = np.take(table, np.arange(table.shape[1]), 1)
    key = value = None
    metadata = changed(metadata, slot_mapping=np.where(metadata.host.slot_mapping < 0, 0, 0))
return whole(query, key, value, kv_cache, metadata, output)
"""
        ),
    ),
    Fault(
        "chunks_of_the_list_builder_are_read_as_given",
        "test_chunks_of_the_list_builder_attend_without_writing[NaN]",
        "the output holds NaN in the prefill of 5 after 3",
        forward(
            """
if not write and metadata.from_groups and metadata.num_prefills and key is not None:
    return super(Impl, self).forward(query, key, value, kv_cache.clone(), metadata, output)
return whole(query, key, value, kv_cache, metadata, output)
"""
        ),
    ),
    Fault(
        "write_cache_does_nothing", f"{READS}[write_cache-None]", "write_cache left another cache than forward does",
        WRITE_CACHE.format(body="pass"),
    ),
    Fault(
        "write_cache_writes_keys_alone", f"{READS}[write_cache-None]", "write_cache left another cache",
        WRITE_CACHE.format(body="super(Impl, self).write_cache(key, value * 0, kv_cache, metadata)"),
    ),
    Fault(
        "write_cache_writes_what_is_masked", "test_padded_decodes_attend_without_writing",
        "write_cache left another cache",
        WRITE_CACHE.format(
            body="super(Impl, self).write_cache(key, value, kv_cache, metadata); "
            "kv_cache[0, -1, -1] = torch.where((metadata.slot_mapping < 0).any(), key[0], kv_cache[0, -1, -1])"
        ),
    ),
    Fault(
        "views_exchanged", f"{READS}[the engine-None]", "differs from dense",
        """
def kv_cache_views(self, kv_cache):
    return tuple(reversed(super(Backend, self).kv_cache_views(kv_cache)))
Backend.kv_cache_views = kv_cache_views
""",
    ),
    Fault(
        "contiguous_blocks", f"{PAIR}[blocks apart]", "with a pair of views (blocks apart)",
        forward(
            """
if isinstance(kv_cache, tuple):
    size, heads, head = kv_cache[0].shape[1:]
    strides = (size * heads * head, heads * head, head, 1)
    kv_cache = tuple(part.as_strided(part.shape, strides) for part in kv_cache)
return whole(query, key, value, kv_cache, metadata, output)
"""
        ),
        STRIDED,
    ),
    Fault(
        "heads_take_the_strides_of_tokens", f"{PAIR}[heads before tokens]", "with a pair of views",
        forward(
            """
if isinstance(kv_cache, tuple):
    size, heads, head = kv_cache[0].shape[1:]
    kv_cache = tuple(part.as_strided(part.shape, (part.stride(0), heads * head, head, 1)) for part in kv_cache)
return whole(query, key, value, kv_cache, metadata, output)
"""
        ),
        STRIDED,
    ),
    Fault(
        "a_copy_of_the_pair_is_written", f"{PAIR}[key and value in one row]", "forward wrote nothing to slot",
        forward(
            """
if isinstance(kv_cache, tuple):
    kv_cache = tuple(part.contiguous() for part in kv_cache)
return whole(query, key, value, kv_cache, metadata, output)
"""
        ),
        STRIDED,
    ),
    Fault(
        "writes_beside_the_pair", f"{PAIR}[blocks apart]", "memory beside them was written to",
        forward(
            """
answer = whole(query, key, value, kv_cache, metadata, output)
if isinstance(kv_cache, tuple):  # the row before the first
    kv_cache[0].as_strided((key.shape[2],), (1,), kv_cache[0].storage_offset() - key.shape[2]).fill_(1.0)
return answer
"""
        ),
        STRIDED,
    ),
    Fault(
        "blocks_of_a_pair_are_copied_in_the_first_half", "test_blocks_of_a_pair_of_views_are_copied[blocks apart]",
        "copy_blocks left other values in block",
        """
def copy_blocks(self, kv_caches, src_to_dst):
    for cache in kv_caches:
        for source, target in src_to_dst:
            cache[0][target] = cache[0][source]
Backend.copy_blocks = copy_blocks
""",
        STRIDED,
    ),
    Fault(
        "masked_tokens_go_to_slot_0",
        "test_padded_tokens_change_no_block",
        "a slot of -1, or a token of padding, writes nothing",
        forward("metadata = changed(metadata, slot_mapping=np.maximum(metadata.host.slot_mapping, 0))\n"
                "return whole(query, key, value, kv_cache, metadata, output)"),
    ),
)  # fmt: skip
