"""Faults of log-sum-exp, and of a rank of context parallelism; each names the test of the kit that must find it."""

from testing.faulty_backend import Fault, forward

LSE = "features={'lse', 'sinks', 'logits_soft_cap', 'encoder_decoder'}"
RANK = "test_a_rank_decodes_over_the_keys_it_keeps"


def with_lse(body: str) -> str:
    return forward(body, "forward_with_lse")


LSE_FAULTS = (
    Fault(
        "a_row_of_a_rank_without_keys_raises",
        "test_a_rank_decodes_over_the_keys_it_keeps[block-1]",
        "RuntimeError: nothing to attend over (attn_a_row_of_a_rank_without_keys_raises_heavy.py",
        forward(
            """
if not metadata.host.seq_lens.all():
    raise RuntimeError("nothing to attend over")
return whole(query, key, value, kv_cache, metadata, output)
""",
            "forward_with_lse",
        ),
        "features={'lse'}",
    ),
    Fault(
        "lse_of_a_graph_to_base_2",
        "test_log_sum_exp_of_captured_sizes",
        "it is as if the logarithm were to base 2, not natural",
        with_lse(
            """
answer, lse = whole(query, key, value, kv_cache, metadata, output)
return answer, lse / np.log(2) if metadata.use_cuda_graph else lse
"""
        ),
        LSE,
    ),
    Fault(
        "lse_to_base_2",
        "test_log_sum_exp_over_random_batches",
        "; it is as if the logarithm were to base 2, not natural",
        with_lse(
            """
answer, lse = whole(query, key, value, kv_cache, metadata, output)
return answer, lse / np.log(2)
"""
        ),
        LSE,
    ),
    Fault(
        "lse_heads_first",
        "test_log_sum_exp_over_random_batches",
        "not float32 (tokens, num_heads)",
        with_lse(
            """
answer, lse = whole(query, key, value, kv_cache, metadata, output)
return answer, lse.T.contiguous()
"""
        ),
        LSE,
    ),
    Fault(
        "lse_without_sinks",
        "test_log_sum_exp_with_features",
        "; it is as if the layer had no sinks",
        with_lse(
            """
answer, lse = whole(query, key, value, kv_cache, metadata, output)
if self.sinks is not None:
    lse = (lse.exp() - self.sinks.exp()).log()
return answer, lse
"""
        ),
        LSE,
    ),
    Fault(
        "lse_with_another_output",
        "test_log_sum_exp_with_the_output_where_it_is_asked",
        "forward_with_lse was given an output and returned another tensor: it ignores its argument output",
        with_lse("return whole(query, key, value, kv_cache, metadata)"),
        LSE,
    ),
    Fault(
        "rank_taken_for_a_profiling_run",
        "test_a_rank_decodes_over_the_keys_it_keeps",
        "decode of 1 after",
        with_lse(
            """
metadata = changed(metadata)
del metadata.host.context_lens
return whole(query, key, value, kv_cache, metadata, output)
"""
        ),
        LSE,
    ),
    Fault(
        "lse_only_declared",
        "test_log_sum_exp_over_random_batches",
        "its class has no forward_with_lse",
        "Impl.forward_with_lse = AttentionImpl.forward_with_lse",
        LSE,
    ),
    Fault(
        "lse_of_the_querys_dtype",
        "test_log_sum_exp_is_float32_in_every_dtype[bfloat16]",
        "gave a log-sum-exp torch.bfloat16",
        with_lse(
            """
answer, lse = whole(query, key, value, kv_cache, metadata, output)
return answer, lse.to(query.dtype)
"""
        ),
        LSE,
    ),
    Fault(
        "lse_rounded_as_the_query",
        "test_log_sum_exp_over_random_batches",
        "gave a log-sum-exp of",
        with_lse(
            """
answer, lse = whole(query, key, value, kv_cache, metadata, output)
return answer, lse.to(torch.bfloat16).float()
"""
        ),
        LSE,
    ),
    Fault(
        "lse_before_the_cap",
        "test_log_sum_exp_with_features",
        "; it is as if the layer had no logits_soft_cap",
        with_lse(
            """
from dataclasses import replace
answer, _ = whole(query, key, value, kv_cache, metadata, output)
scoring = self._scoring
self._scoring = replace(scoring, logits_soft_cap=None)
_, lse = whole(query, key, value, kv_cache, metadata)
self._scoring = scoring
return answer, lse
"""
        ),
        LSE,
    ),
    Fault(
        "lse_of_no_key_is_a_number",
        "test_log_sum_exp_of_cross_attention",
        "; it is 0 where a token sees no key: infinite there, the part has no weight",
        with_lse(
            """
answer, lse = whole(query, key, value, kv_cache, metadata, output)
return answer, torch.where(lse.isinf(), 0.0, lse)
"""
        ),
        LSE,
    ),
    Fault(
        "lse_less_the_largest_score",
        "test_log_sum_exp_over_random_batches",
        "gave a log-sum-exp of",
        with_lse(
            """
answer, lse = whole(query, key, value, kv_cache, metadata, output)
return answer, lse - lse.amax(1, keepdim=True)
"""
        ),
        LSE,
    ),
    Fault(
        "output_of_a_rank_that_is_not_normalised",
        f"{RANK}[1-0]",
        "decode of 1 after",
        with_lse(
            """
answer, lse = whole(query, key, value, kv_cache, metadata, output)
if metadata.host.slot_mapping.min() < 0:
    answer = answer * lse.exp().nan_to_num(posinf=0, neginf=0).unsqueeze(2)
return answer, lse
"""
        ),
        LSE,
    ),
    Fault(
        "rank_that_takes_its_fresh_key",
        f"{RANK}[1-1]",
        "; it is as if the slot -1 were written: the step's own key was seen, which another rank keeps",
        with_lse(
            """
host, cache = metadata.host, kv_cache.clone()
right = whole(query, key, value, kv_cache, metadata, output)
absent = host.slot_mapping < 0
if metadata.num_prefills or not absent.any():
    return right
size = cache.shape[2]
table = np.pad(host.block_table, ((0, 0), (0, 1)))
rows = np.arange(len(table))
free = np.where(table[rows, host.seq_lens // size] > 0, table[rows, host.seq_lens // size], 47)
slots = np.where(absent, free * size + host.seq_lens % size, host.slot_mapping)
table[rows, host.seq_lens // size] = np.where(absent, free, table[rows, host.seq_lens // size])
wrong = changed(
    metadata, seq_lens=host.seq_lens + absent.astype(np.int32), slot_mapping=slots, block_table=table,
    context_lens=host.seq_lens - (~absent).astype(np.int32),
)
return whole(query, key, value, cache, wrong)
"""
        ),
        LSE,
    ),
    Fault(
        "rank_that_counts_as_the_other",
        f"{RANK}[1-1]",
        "; it is as if rank 1 read as many keys as rank 0 keeps",
        with_lse(
            """
host, cache = metadata.host, kv_cache.clone()
right = whole(query, key, value, kv_cache, metadata, output)
absent = host.slot_mapping < 0
if not absent.any() or metadata.num_prefills:
    return right
lens = host.seq_lens + absent.astype(np.int32)
table = np.pad(host.block_table, ((0, 0), (0, 1)))
return whole(
    query, key, value, cache, changed(metadata, seq_lens=lens, context_lens=lens - ~absent, block_table=table)
)
"""
        ),
        LSE,
    ),
    Fault(
        "rank_writes_the_keys_before_those_left_out",
        RANK,
        "; it is as if slots of -1 were left out and their keys not",
        with_lse(
            """
written = metadata.slot_mapping >= 0
if not metadata.num_prefills and not written.all():
    key, value = key.clone(), value.clone()
    for new in (key, value):
        new[written] = new[: int(written.sum())].clone()
return whole(query, key, value, kv_cache, metadata, output)
"""
        ),
        LSE,
    ),
    Fault(
        "a_chunk_of_a_context_without_its_last_key",
        "test_contexts_in_chunks[of all]",
        "queries over",
        with_lse(
            """
if self.attn_type == "encoder_decoder" and kv_cache is None:
    key, value = key.clone(), value.clone()
    starts = metadata.host.encoder_query_start_loc
    for start, end in zip(starts[:-1], starts[1:]):
        if end - start > 2:
            key[end - 1], value[end - 1] = key[start], value[start]
return whole(query, key, value, kv_cache, metadata, output)
"""
        ),
        LSE,
    ),
    Fault(
        "a_chunk_of_a_context_is_not_read_beside_a_cache",
        "test_contexts_in_chunks[of all]",
        "the layer's cache given, which is neither written nor read",
        with_lse(
            """
if self.attn_type == "encoder_decoder" and kv_cache is not None and not metadata.cross_block_table.shape[1]:
    key = torch.zeros_like(key)
return whole(query, key, value, kv_cache, metadata, output)
"""
        ),
        LSE,
    ),
    *(
        Fault(
            f"lse_rounded_to_{dtype}",
            "test_log_sum_exp_is_float32_in_every_dtype[bfloat16]",
            f"; it is as if it were rounded to torch.{dtype}",
            with_lse(
                f"""
answer, lse = whole(query, key, value, kv_cache, metadata, output)
return answer, lse.to(torch.{dtype}).float() if query.dtype == torch.bfloat16 else lse
"""
            ),
            LSE,
        )
        for dtype in ("float16", "bfloat16")
    ),
)
