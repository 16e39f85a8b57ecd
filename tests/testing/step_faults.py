"""Faults of steps: tensors, changing batches, padding, captured sizes; each names the test that must find it."""

from testing.faulty_backend import USUAL_SCALE, Fault, forward

STEP_FAULTS = (
    Fault(
        "a_profiling_run_reads_a_cache",
        "test_a_profiling_run_of_the_persistent_builder[a cache]",
        "differs from dense",
        forward(
            """
answer = whole(query, key, value, kv_cache, metadata, output)
return answer.zero_() if kv_cache is not None and not metadata.block_table.shape[1] else answer
"""
        ),
    ),
    Fault(
        "ignores_output",
        "test_the_layer_as_a_torch_operator[False]",
        "it ignores its argument output, which is to be filled where it lies, and returned",
        forward("return whole(query, key, value, kv_cache, metadata)"),
    ),
    Fault(
        "replays_the_lengths_of_the_capture",
        "test_captured_sizes_over_changing_batches[1]",
        "decode of 1 after",
        forward("""
if not metadata.use_cuda_graph or not metadata.host.seq_lens.any():
    return whole(query, key, value, kv_cache, metadata, output)
kept = self.__dict__.setdefault("kept", {}).setdefault(metadata.num_reqs, metadata.host.seq_lens.copy())
return whole(query, key, value, kv_cache, changed(metadata, seq_lens=kept), output)
"""),
    ),
    Fault(
        "takes_captured_rows_for_rows_of_one_length",
        "test_captured_sizes_of_any_lengths",
        "prefill of",
        forward("""
starts = metadata.host.query_start_loc
if not metadata.use_cuda_graph or metadata.max_query_len < 2 or not starts[-1]:
    return whole(query, key, value, kv_cache, metadata, output)
even = ((np.arange(len(starts)) * starts[-1]) // (len(starts) - 1)).astype(starts.dtype)
return whole(query, key, value, kv_cache, changed(metadata, query_start_loc=even), output)
"""),
        "cuda_graph='always'",
    ),
    Fault(
        "attends_for_an_even_share_of_each_captured_row",
        "test_captured_prompts_beside_decodes",
        "prefill of",
        forward("""
answer, starts = whole(query, key, value, kv_cache, metadata, output), metadata.host.query_start_loc
share = metadata.num_tokens // metadata.num_reqs
if metadata.use_cuda_graph and metadata.max_query_len > share:
    for first, last in zip(starts[:-1], starts[1:]):
        answer[first + share : last] = 0
return answer
"""),
        "cuda_graph='always'",
    ),
    Fault(
        "keeps_what_a_capture_planned_by_its_rows_alone",
        "test_captured_prompts_beside_decodes",
        "prefill of",
        forward("""
answer, starts = whole(query, key, value, kv_cache, metadata, output), metadata.host.query_start_loc
longest = self.__dict__.setdefault("longest", {})
if metadata.use_cuda_graph and not starts[-1]:
    longest[metadata.num_reqs] = metadata.max_query_len
elif metadata.use_cuda_graph:
    for first, last in zip(starts[:-1], starts[1:]):
        answer[first + longest[metadata.num_reqs] : last] = 0
return answer
"""),
        "cuda_graph='always'",
    ),
    Fault(
        "takes_a_size_of_as_many_tokens_as_rows_for_decodes",
        "test_captured_prompts_beside_decodes",
        "prefill of",
        forward("""
answer, starts = whole(query, key, value, kv_cache, metadata, output), metadata.host.query_start_loc
if metadata.use_cuda_graph and metadata.num_tokens == metadata.num_reqs:
    for first, last in zip(starts[:-1], starts[1:]):
        answer[first + 1 : last] = 0
return answer
"""),
        "cuda_graph='always'",
    ),
    Fault(
        "splits_keys_by_the_plan_of_the_first_replay",
        "test_captured_sizes_over_changing_lengths[1]",
        "; the next step is right without a graph: it is as if a plan of an earlier step was replayed",
        forward("""
lens, parts = metadata.host.seq_lens, -(-metadata.host.seq_lens // 256)
if not metadata.use_cuda_graph or not lens.any():
    return whole(query, key, value, kv_cache, metadata, output)
parts = self.__dict__.setdefault("planned", {}).setdefault(metadata.num_reqs, np.maximum(parts, 1))
whole(query, key, value, kv_cache, metadata, output)
lens = np.minimum(lens, 256 * parts).astype(np.int32)
return whole(query, key, value, kv_cache, changed(metadata, seq_lens=lens), output)
"""),
    ),
    Fault(
        "positions_taken_for_places_among_the_keys",
        "test_chunked_local_attention",
        "; it is as if a token saw the keys behind it, too, in all chunks but a request's first",
        forward("""
from attncore.dense import dense_attention
answer, host = whole(query, key, value, kv_cache, metadata, output), metadata.host
for row, (first, last) in enumerate(zip(host.query_start_loc, host.query_start_loc[1:])):
    if first < last and host.positions[first] > host.context_lens[row]:
        keys, values = (part[host.block_table[row].tolist()].flatten(0, 1)[: host.seq_lens[row]] for part in kv_cache)
        answer[first:last] = dense_attention(query[first:last], keys, values, scale=self.scale, causal=False)
return answer
"""),
    ),
    Fault(
        "writes_in_an_empty_step",
        "test_captured_sizes_over_changing_batches[1]",
        "or a token of padding, writes nothing",
        forward("""
if metadata.use_cuda_graph and not metadata.host.seq_lens.any():
    kv_cache[:, 3] += 1
return whole(query, key, value, kv_cache, metadata, output)
"""),
    ),
    Fault(
        "wrong_with_more_than_16_requests",
        "test_many_requests_in_a_step",
        "differs from dense",
        forward(
            "return whole(query, key, value, kv_cache, metadata, output).div_(1 + (len(metadata.host.seq_lens) > 16))"
        ),
    ),
    Fault(
        "wrong_with_more_than_16_decodes",
        "test_many_requests_in_a_step",
        "decode of 1 after",
        forward(
            "wrong = metadata.num_decodes > 16 and not metadata.num_prefills\n"
            "return whole(query, key, value, kv_cache, metadata, output).div_(1 + wrong)"
        ),
    ),
    Fault(
        "keeps_lengths",
        "test_a_smaller_batch_after_a_larger_one",
        "differs",
        forward(
            """
lengths = metadata.host.seq_lens
if metadata.max_query_len == 1 and len(lengths) >= len(getattr(self, 'kept', [])):
    self.kept = lengths.copy()
if metadata.max_query_len == 1:
    metadata = changed(metadata, seq_lens=self.kept[: len(lengths)])
return whole(query, key, value, kv_cache, metadata, output)
"""
        ),
    ),
    Fault(
        "only_fresh_keys",
        "test_chunked_prefill",
        "prefill of",
        forward(
            """
tokens = np.diff(metadata.host.query_start_loc)
if metadata.max_query_len > 1:
    metadata = changed(metadata, seq_lens=tokens.astype(np.int32))
return whole(query, key, value, kv_cache, metadata, output)
"""
        ),
    ),
    Fault(
        "scales_query",
        "test_prefill",
        "forward changed its argument query",
        forward("return whole(query.mul_(0.5).clone().mul_(2), key, value, kv_cache, metadata, output)"),
    ),
    Fault(
        "other_output",
        "test_output_is_written_where_it_is_asked",
        "it ignores its argument output, which is to be filled where it lies, and returned",
        forward("return whole(query, key, value, kv_cache, metadata)"),
    ),
    Fault(
        "returns_the_output_as_it_was",
        "test_output_is_written_where_it_is_asked",
        "forward returned the output that it was given, and wrote nothing to it",
        forward("found = whole(query, key, value, kv_cache, metadata)\nreturn found if output is None else output"),
    ),
    Fault(
        "float_output",
        "test_dtype[bfloat16]",
        "torch.float32",
        forward("return whole(query, key, value, kv_cache, metadata, output).float()"),
    ),
    Fault(
        "needs_a_table",
        "test_plain_prompts_of_the_list_builder",
        "no columns",
        forward(
            """
if metadata.block_table.shape[1] == 0:
    raise RuntimeError('no columns')
return whole(query, key, value, kv_cache, metadata, output)
"""
        ),
    ),
    Fault(
        "prompts_without_a_table_with_the_usual_scale",
        "test_plain_prompts_of_the_list_builder",
        "it is as if the scale were 1 / sqrt(head_size), not the layer's own, 0.7",
        forward(USUAL_SCALE.format(where="metadata.from_groups and not metadata.block_table.shape[1]")),
        "features=set()",
    ),
    Fault(
        "reads_padded_rows",
        "test_a_graph_batch_of_the_persistent_builder",
        "; it is right without the rows of padding, whose slots are -1",
        forward(
            """
if len(np.unique(metadata.host.query_start_loc)) < len(metadata.host.query_start_loc):
    return whole(query, key, value, kv_cache, metadata, output).neg_()
return whole(query, key, value, kv_cache, metadata, output)
"""
        ),
    ),
    Fault(
        "plans_by_the_metadata_object",
        "test_steps_of_a_builder_that_uses_its_metadata_again",
        "differs from dense",
        forward("""
lens = self.__dict__.setdefault("kept", {}).setdefault(metadata, metadata.host.seq_lens.copy())
if len(lens) == len(metadata.host.seq_lens):
    metadata = changed(metadata, seq_lens=lens)
return whole(query, key, value, kv_cache, metadata, output)
"""),
    ),
    Fault(
        "wrong_after_2048_tokens",
        "test_steps_over_long_contexts",
        "decode of 1 after 2049",
        forward(
            "return whole(query, key, value, kv_cache, metadata, output).div_(1 + (metadata.max_decode_seq_len > 2048))"
        ),
    ),
    Fault(
        "instances_that_share_a_table_of_plans",
        "test_two_instances_side_by_side",
        "differs from dense",
        """
SHARED = {}
def plan_layers(self, metadata, key):
    SHARED.setdefault("heads", self.config.num_heads)
Backend.plan_layers = plan_layers
"""
        + forward(
            "wrong = SHARED['heads'] != self.backend.config.num_heads\n"
            "return whole(query, key, value, kv_cache, metadata, output).div_(1 + wrong)"
        ),
    ),
    Fault(
        "takes_the_rows_of_one_token_for_the_first",
        "test_rows_in_the_order_of_an_engine",
        "differs from dense",
        forward(
            """
lens = metadata.host.query_lens
wrong = not metadata.from_groups and (lens[: (lens == 1).sum()] > 1).any()
return whole(query, key, value, kv_cache, metadata, output).div_(1 + wrong)
"""
        ),
    ),
    Fault(
        "knows_one_kind_of_builder",
        "test_rows_in_the_order_of_an_engine",
        "has no attribute 'max_num_batched_tokens'",
        forward(
            """
if metadata.builder is not None:
    metadata.builder.max_num_batched_tokens
return whole(query, key, value, kv_cache, metadata, output)
"""
        ),
    ),
    Fault(
        "queries_rounded_by_the_largest_of_the_step",
        "test_a_graph_batch_of_the_persistent_builder[1]",
        "as rows of padding do in query, key and value",
        forward("""
largest = query.abs().max()
return whole(query / largest * largest, key, value, kv_cache, metadata, output)
"""),
    ),
    Fault(
        "the_mean_value_of_a_padded_step",
        "test_padded_tokens_change_no_block[5]",
        "as rows of padding do in query, key and value",
        forward("""
answer = whole(query, key, value, kv_cache, metadata, output)
return answer + 0 * value.mean() if metadata.num_prefills else answer
"""),
    ),
    Fault(
        "padded_rows_reach_a_graphs_rows",
        "test_captured_sizes_over_changing_batches[1]",
        "as rows of padding do in query, key and value",
        forward("""
answer = whole(query, key, value, kv_cache, metadata, output)
return answer + 0 * key.sum() if metadata.use_cuda_graph and metadata.host.seq_lens.any() else answer
"""),
    ),
    Fault(
        "a_graph_reads_the_row_behind_the_last_key",
        "test_captured_sizes_over_changing_batches[1]",
        "an unused row of a last page",
        forward("""
answer, lens, size = whole(query, key, value, kv_cache, metadata, output), metadata.host.seq_lens, kv_cache.shape[2]
if metadata.use_cuda_graph and lens.any() and lens[0] % size:
    answer += 0 * kv_cache[:, int(metadata.host.block_table[0, lens[0] // size]), lens[0] % size].sum()
return answer
"""),
    ),
    Fault(
        "padded_rows_take_the_first_ones_place",
        "test_a_graph_batch_of_the_list_builder[2]",
        "differs",
        forward("""
answer = whole(query, key, value, kv_cache, metadata, output)
if metadata.use_cuda_graph and (metadata.slot_mapping < 0).any():
    answer[0] = 0
return answer
"""),
    ),
    Fault(
        "a_profiling_run_writes_to_block_0",
        "test_a_profiling_run_of_the_list_builder",
        "changed",
        forward("""
if kv_cache is not None and (metadata.slot_mapping < 0).all():
    kv_cache[:, 0] += 1
return whole(query, key, value, kv_cache, metadata, output)
"""),
    ),
    Fault(
        "lengths_of_a_longer_step_stay",
        "test_shorter_requests_after_longer_ones",
        "differs",
        forward("""
self.longest = max(getattr(self, "longest", 0), metadata.max_seq_len)
answer = whole(query, key, value, kv_cache, metadata, output)
return answer if 2 * metadata.max_seq_len > self.longest else answer.mul_(metadata.max_seq_len / self.longest)
"""),
    ),
    Fault(
        "a_sum_is_begun_with_the_last_steps",
        "test_the_same_step_twice_gives_the_same",
        "differs",
        forward("""
answer = whole(query, key, value, kv_cache, metadata, output)
answer += getattr(self.backend, "left", 0)
self.backend.left = 0.3
return answer
"""),
    ),
    Fault(
        "takes_no_more_tokens_than_the_metadata_has",
        "test_tokens_beyond_the_metadata",
        "query: 9 rows",
        forward("""
if len(query) > metadata.num_tokens:
    raise ValueError(f"query: {len(query)} rows")
return whole(query, key, value, kv_cache, metadata, output)
"""),
    ),
    Fault(
        "values_of_padding_times_0",
        "test_tokens_beyond_the_metadata",
        "NaN",
        forward("""
answer = whole(query, key, value, kv_cache, metadata, output)
if value is not None and not metadata.host.context_lens.any():
    answer[: metadata.num_tokens] += 0.0 * value[metadata.num_tokens :].sum()
return answer
"""),
    ),
    Fault(
        "views_of_as_many_rows_share_a_plan",
        "test_parts_of_a_step[slices]",
        "differs",
        """
def plan_layers(self, metadata, key):
    if metadata.builder is None:
        planned = vars(self).setdefault("planned", {}).setdefault(metadata.num_reqs, np.array(metadata.host.seq_lens))
        metadata.kept["another's"] = not np.array_equal(planned, metadata.host.seq_lens)
Backend.plan_layers = plan_layers
"""
        + forward("""
return whole(query, key, value, kv_cache, metadata, output).div_(1 + metadata.kept.get("another's", False))
"""),
    ),
    Fault(
        "takes_no_more_tokens_without_writing",
        "test_tokens_beyond_the_metadata",
        "query: 9 rows",
        forward("""
if not write and len(query) > metadata.num_tokens:
    raise ValueError(f"query: {len(query)} rows")
return whole(query, key, value, kv_cache, metadata, output)
"""),
    ),
    Fault(
        "takes_no_more_tokens_with_the_log_sum_exp",
        "test_tokens_beyond_the_metadata",
        "query: 9 rows",
        forward(
            """
if len(query) > metadata.num_tokens:
    raise ValueError(f"query: {len(query)} rows")
return whole(query, key, value, kv_cache, metadata, output)
""",
            "forward_with_lse",
        ),
        "features={'lse'}",
    ),
    Fault(
        "writes_a_profiling_run_without_a_cache",
        "test_a_profiling_run_of_the_persistent_builder[no cache]",
        "'NoneType' object has no attribute 'shape'",
        """
def write_cache(self, key, value, kv_cache, metadata):
    kv_cache.shape
    super(Impl, self).write_cache(key, value, kv_cache, metadata)
Impl.write_cache = write_cache
""",
    ),
    Fault(
        "a_profiling_run_is_read_in_a_cache_without_writing",
        "test_a_profiling_run_of_the_persistent_builder[a cache]",
        "differs",
        forward("""
found = whole(query, key, value, kv_cache, metadata, output)
return found if write or metadata.block_table.shape[1] or kv_cache is None else found * 0
"""),
    ),
)
