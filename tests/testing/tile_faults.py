"""Faults in the manner of kernels (rocm) and of the reference: tiles, heads, the cache."""

from testing.faulty_backend import Fault, forward, init

TILE_FAULTS = (
    Fault(
        "last_tile_unmasked",
        "test_decode",
        "differs from dense",
        forward(
            """
lens, size = metadata.host.seq_lens, kv_cache.shape[2]
if not metadata.num_prefills:
    whole(query, key, value, kv_cache, metadata, output)
    whole_tiles = (-(-lens // 16) * 16).astype(np.int32)
    table = np.pad(metadata.host.block_table, ((0, 0), (0, 16 // size)))
    metadata = changed(metadata, seq_lens=whole_tiles, block_table=table)
    return whole(query, key, value, kv_cache.clone(), metadata, output)
return whole(query, key, value, kv_cache, metadata, output)
"""
        ),
    ),
    Fault(
        "second_tile_of_queries",
        "test_steps_over_long_contexts",
        "prefill of 2049 after 0",
        forward(
            """
answer = whole(query, key, value, kv_cache, metadata, output)
if metadata.max_query_len > 64:
    answer[64:128] = answer[63:127].clone()
return answer
"""
        ),
    ),
    Fault(
        "first_tile_under_a_window",
        "test_nothing_is_read_that_a_window_has_passed",
        "it is as if the window were W - 1",
        forward(
            """
from dataclasses import replace
if self.sliding_window:
    less = metadata.max_seq_len > 64 and not metadata.num_prefills
    self._scoring = replace(self._scoring, sliding_window=self.sliding_window - less)
return whole(query, key, value, kv_cache, metadata, output)
"""
        ),
    ),
    Fault(
        "parts_merged_without_their_weights",
        "test_steps_over_long_contexts",
        "decode of 1 after 2049",
        forward(
            """
answer = whole(query, key, value, kv_cache, metadata, output)
if metadata.max_decode_seq_len > 512 and not metadata.num_prefills:
    half = changed(metadata, seq_lens=-(-metadata.host.seq_lens // 2))
    answer = (answer + whole(query, key, value, kv_cache.clone(), half)) / 2
return answer
"""
        ),
    ),
    Fault(
        "exponents_of_a_second_tile_to_base_2",
        "test_steps_over_long_contexts",
        "decode of 1 after 2049",
        forward(
            """
from dataclasses import replace
scoring = self._scoring
if metadata.max_decode_seq_len > 512:
    self._scoring = replace(scoring, scale=scoring.scale * float(np.log(2)))
answer = whole(query, key, value, kv_cache, metadata, output)
self._scoring = scoring
return answer
"""
        ),
    ),
    Fault(
        "groups_of_three_in_tiles_of_four",
        "test_grouped_heads[6-2]",
        "6 heads over 2",
        forward(
            """
return whole(query, key, value, kv_cache, metadata, output).div_(1 + (query.shape[1] == 3 * key.shape[1]))
"""
        ),
    ),
    Fault(
        "sinks_of_the_key_heads",
        "test_a_feature_over_random_batches[sinks]",
        "differs from dense",
        init("s = features['sinks']; features['sinks'] = None if s is None else s[[0, 0, 2, 2]]"),
    ),
    Fault(
        "slopes_of_the_key_heads",
        "test_alibi_slopes_in_any_order",
        "differs from dense",
        init(
            "given, size = features['alibi_slopes'], backend.config.num_heads // backend.config.num_kv_heads\n"
            "    features['alibi_slopes'] = given and [given[h // size * size] for h in range(len(given))]"
        ),
    ),
    Fault(
        "cap_after_the_scale_is_taken_twice",
        "test_a_feature_over_random_batches[logits_soft_cap]",
        "logits_soft_cap 1.5",
        init("features['logits_soft_cap'] = features['logits_soft_cap'] and 2 * features['logits_soft_cap']"),
    ),
    Fault(
        "sorted_by_length_and_not_put_back",
        "test_decode",
        "rows or tokens exchanged",
        forward(
            """
answer = whole(query, key, value, kv_cache, metadata, output)
if not metadata.num_prefills:
    own = answer[: metadata.num_reqs]
    own.copy_(own[np.argsort(metadata.host.seq_lens, kind="stable")])
return answer
"""
        ),
    ),
    Fault(
        "keys_rounded_to_bfloat16",
        "test_prefill",
        "differs from dense",
        forward(
            """
return whole(query, key.bfloat16().to(key.dtype), value, kv_cache, metadata, output)
"""
        ),
    ),
    Fault(
        "keys_and_values_exchanged",
        "test_prefill",
        "it is as if keys and values were exchanged",
        forward(
            """
return whole(query, value, key, kv_cache, metadata, output)
"""
        ),
    ),
    Fault(
        "last_token_not_written",
        "test_prefill",
        "every token must own as many",
        forward(
            """
before, slot = kv_cache.clone(), int(metadata.host.slot_mapping[-1])
answer = whole(query, key, value, kv_cache, metadata, output)
if slot >= 0 and metadata.num_prefills:
    block, offset = divmod(slot, kv_cache.shape[2])
    kv_cache[:, block, offset] = before[:, block, offset]
return answer
"""
        ),
    ),
    Fault(
        "prompt_of_one_token_taken_for_a_decode",
        "test_prefill",
        "prefill of 1 after 0",
        forward(
            """
answer = whole(query, key, value, kv_cache, metadata, output)
starts = metadata.host.query_start_loc
for row, length in enumerate(metadata.host.seq_lens):
    if length == 1:
        answer[starts[row]] = 0
return answer
"""
        ),
    ),
    Fault(
        "swaps_the_other_way",
        "test_blocks_are_swapped_to_another_cache",
        "source block 5 is outside",
        """
def swap_blocks(self, source, target, src_to_dst):
    ReferenceBackend.swap_blocks(self, target, source, src_to_dst)
Backend.swap_blocks = swap_blocks
""",
    ),
    Fault(
        "copies_the_first_cache_alone",
        "test_blocks_are_copied_within_caches",
        "should hold what block",
        """
def copy_blocks(self, kv_caches, src_to_dst):
    ReferenceBackend.copy_blocks(self, kv_caches[:1], src_to_dst)
Backend.copy_blocks = copy_blocks
""",
    ),
    Fault(
        "the_last_token_of_a_long_chunk_behind_a_context",
        "test_long_chunks_behind_a_context",
        "differs",
        forward("""
answer = whole(query, key, value, kv_cache, metadata, output)
starts = metadata.host.query_start_loc
for row, context in enumerate(metadata.host.context_lens):
    if context and starts[row + 1] - starts[row] > 16:
        answer[starts[row + 1] - 1] = 0
return answer
"""),
    ),
    Fault(
        "decodes_attend_before_the_chunks_are_written",
        "test_a_prefix_that_the_same_step_computes",
        "decode of 1 after 8 (request decode)",
        forward("""
parts = metadata.decode_metadata, metadata.prefill_metadata
if not write or kv_cache is None or metadata.from_groups or None in parts:
    return whole(query, key, value, kv_cache, metadata, output)
output, start = torch.zeros_like(query) if output is None else output, 0
for part in parts:
    rows = slice(start, start + part.num_tokens)
    whole(query[rows], key[rows], value[rows], kv_cache, part, output[rows])
    start = rows.stop
return output
"""),
    ),
)
