"""Faults of two settings at once: a feature, a length or a method that is wrong in a dtype, layout or cache alone."""

from testing.faulty_backend import Fault, forward

ALL = (
    "dtypes={'float32', 'float16', 'bfloat16'}, kv_cache_dtypes={'auto', 'bfloat16', 'fp8_e4m3', 'fp8_e5m2'}, "
    "kv_cache_layouts=('NHD', 'HND'), head_size_v=MultipleOf(8), use_mla=True, "
    "features={'sliding_window', 'logits_soft_cap', 'alibi', 'sinks', 'multi_token_decode', 'lse', 'encoder', "
    "'encoder_decoder', 'strided_kv_cache', 'kv_scales', 'kv_scales_on_device', 'kv_scales_per_head'}"
)
FEATURES = ("sliding_window", "logits_soft_cap", "alibi_slopes", "sinks")
LONG = "max(metadata.host.seq_lens, default=0) > 512"
IN_16_BITS = "self.backend.config.dtype != 'float32'"
HND = "self.backend.config.kv_cache_layout == 'HND'"
FP8 = "'fp8' in self.backend.config.kv_cache_dtype"
PAIR = "isinstance(kv_cache, tuple)"
VALUES = "self.backend.config.head_size_v not in (None, self.backend.config.head_size)"
ADOPTED = "type(getattr(metadata, 'builder', None)).__name__ == 'AdoptedSteps'"
EACH_ITS_KEYS = "self.backend.config.num_heads == self.backend.config.num_kv_heads"
SCALED = "isinstance(self.v_scale, torch.Tensor) or self.v_scale != 1"
NO_TABLE = "metadata.from_groups and metadata.block_table.shape[1] == 0"
GRAPH = "self.attn_type == 'decoder' and metadata.use_cuda_graph"
PROMPTS = f"{GRAPH} and metadata.max_query_len > 3"  # a size of tokens: of decodes none has so many


def forgets(when: str, *features: str) -> str:
    """Code of a layer that leaves out ``features`` where ``when``."""
    without = ", ".join(f"{name}=None" for name in features or FEATURES)
    return "import dataclasses\n" + forward(f"""
sound = self._scoring
if {when}:
    self._scoring = dataclasses.replace(sound, {without})
try:
    return whole(query, key, value, kv_cache, metadata, output)
finally:
    self._scoring = sound
""")


def negates(when: str) -> str:
    """Code of a layer whose output is negated where ``when``."""
    return forward(f"""
answer = whole(query, key, value, kv_cache, metadata, output)
return answer.mul_(-1) if {when} else answer
""")


def writes_unless(when: str) -> str:
    """Code of a layer whose ``write_cache`` does nothing where ``when``."""
    return f"""
def write_cache(self, key, value, kv_cache, metadata):
    if not ({when}):
        super(Impl, self).write_cache(key, value, kv_cache, metadata)
Impl.write_cache = write_cache
"""


def copies_unless(method: str, when: str) -> str:
    """Code of a backend whose ``copy_blocks`` or ``swap_blocks`` does nothing where ``when`` of its configuration."""
    return f"""
def {method}(self, *given):
    config = self.config
    if not ({when}):
        super(Backend, self).{method}(*given)
Backend.{method} = {method}
"""


def of_prompts(name: str, test: str, says: str, code: str) -> Fault:
    """A fault of captured prompts, of a backend that declares all that is crossed."""
    return Fault(name, f"test_captured_prompts_{test}", says, code, f"{ALL}, cuda_graph='always'")


def crossed(name: str, test: str, says: str, code: str) -> Fault:
    """A fault of a backend that declares all that is crossed."""
    return Fault(name, test, says, code, ALL)


LONG_FEATURE, METHODS = "test_long_contexts_with_a_feature", "test_every_method"
CAPTURED, COPIED = "test_captured_sizes", "test_blocks_are_copied_and_swapped_in"
OTHER_CACHE = "write_cache left another cache than forward does"

CROSSED_FAULTS = (
    crossed(
        "no_window_in_a_graph", f"{CAPTURED}_with_a_feature[sliding_window]",
        "it is as if the layer had no sliding_window", forgets(GRAPH, "sliding_window"),
    ),
    crossed(
        "no_sinks_in_a_graph", f"{CAPTURED}_with_a_feature[sinks]", "it is as if the layer had no sinks",
        forgets(GRAPH, "sinks"),
    ),
    crossed(
        "no_cap_beside_slopes_in_a_graph", f"{CAPTURED}_with_a_feature[together]", "differs",
        forgets(f"{GRAPH} and self.alibi_slopes is not None", "logits_soft_cap"),
    ),
    of_prompts("no_window_of_captured_prompts", "with_a_feature[sliding_window]",
               "it is as if the layer had no sliding_window", forgets(PROMPTS, "sliding_window")),
    of_prompts("no_sinks_of_captured_prompts", "with_a_feature[sinks]",
               "it is as if the layer had no sinks", forgets(PROMPTS, "sinks")),
    of_prompts("captured_prompts_over_512_keys", "over_long_contexts", "differs", negates(f"{PROMPTS} and {LONG}")),
    of_prompts("captured_prompts_in_16_bits", "in_a_dtype[bfloat16]", "with dtype bfloat16",
               negates(f"{PROMPTS} and {IN_16_BITS}")),
    of_prompts("captured_prompts_in_layout_hnd", "in_a_layout[HND]", "with layout HND",
               negates(f"{PROMPTS} and {HND}")),
    of_prompts("captured_prompts_over_fp8", "over_a_cache_dtype[fp8_e4m3]", "with cache fp8_e4m3",
               negates(f"{PROMPTS} and {FP8}")),
    of_prompts("captured_prompts_over_a_pair_of_views", "over_a_pair_of_views", "with a pair of views",
               negates(f"{PROMPTS} and {PAIR}")),
    of_prompts("captured_prompts_with_a_value_head", "with_a_value_head", "with a value head",
               negates(f"{PROMPTS} and {VALUES} and not self.backend.config.use_mla")),
    of_prompts("captured_prompts_with_a_key_head_for_each", "with_a_group_of_heads[4-4]", "with 4 heads over 4",
               negates(f"{PROMPTS} and {EACH_ITS_KEYS}")),
    Fault(
        "captured_prompts_over_a_latent_cache", "test_latent_captured_prompts", "differs",
        negates(f"{PROMPTS} and self.backend.config.use_mla"), f"{ALL}, cuda_graph='always'",
    ),
    Fault(
        "no_features_of_drafts_in_a_graph", "test_captured_drafts_with_features", "differs",
        forgets(f"{GRAPH} and metadata.max_query_len > 1"), "cuda_graph='uniform'",
    ),
    crossed(
        "no_features_without_writing_in_a_graph", f"{CAPTURED}_with_features_without_writing", "differs",
        forgets(f"{GRAPH} and not write"),
    ),
    crossed(
        "no_cap_beyond_512_keys", f"{LONG_FEATURE}[logits_soft_cap]", "it is as if the layer had no logits_soft_cap",
        forgets(LONG, "logits_soft_cap"),
    ),
    crossed(
        "no_slopes_beyond_512_keys", f"{LONG_FEATURE}[alibi]", "it is as if the layer had no alibi_slopes",
        forgets(LONG, "alibi_slopes"),
    ),
    crossed(
        "no_sinks_beyond_512_keys", f"{LONG_FEATURE}[sinks]", "it is as if the layer had no sinks",
        forgets(LONG, "sinks"),
    ),
    crossed(
        "no_window_of_more_than_140", f"{LONG_FEATURE}[sliding_window]", "it is as if the layer had no sliding_window",
        forgets("(self.sliding_window or 0) > 140", "sliding_window"),
    ),
    crossed(
        "sinks_of_every_part_of_the_keys", f"{LONG_FEATURE}[together]", "forward_with_lse(..., write=False)",
        forward(f"""
answer, lse = whole(query, key, value, kv_cache, metadata, output)
return answer, lse + 1 if {LONG} and self.sinks is not None and self.logits_soft_cap else lse
""", "forward_with_lse"),
    ),
    crossed(
        "a_logarithm_of_some_of_512_keys", f"{METHODS}_in_a_dtype[float32]", "forward_with_lse(..., write=False)",
        forward(f"""
answer, lse = whole(query, key, value, kv_cache, metadata, output)
return answer, lse - 0.5 if {LONG} else lse
""", "forward_with_lse"),
    ),
    crossed(
        "large_heads_beyond_512_keys", "test_long_contexts_with_large_heads", "differs",
        negates(f"query.shape[2] > 64 and {LONG}"),
    ),
    crossed(
        "chunks_of_more_than_200_tokens", f"{LONG_FEATURE}[sinks]", "prefill of 300 after",
        negates("200 < metadata.max_query_len < max(metadata.host.seq_lens)"),
    ),
    crossed(
        "no_features_in_16_bits", f"{METHODS}_in_a_dtype[bfloat16]",
        "with dtype bfloat16 and all declared features", forgets(IN_16_BITS),
    ),
    crossed(
        "long_contexts_in_16_bits", f"{METHODS}_in_a_dtype[float16]", "with dtype float16 and long contexts",
        negates(f"{IN_16_BITS} and {LONG}"),
    ),
    crossed(
        "no_features_in_a_graph_in_16_bits", f"{CAPTURED}_in_a_dtype[bfloat16]",
        "with dtype bfloat16 and all declared features", forgets(f"{GRAPH} and {IN_16_BITS}"),
    ),
    crossed(
        "graphs_in_16_bits", f"{CAPTURED}_in_a_dtype[float16]", "with dtype float16",
        negates(f"{GRAPH} and {IN_16_BITS}"),
    ),
    crossed(
        "no_cap_of_an_encoder_in_16_bits", "test_an_encoder_in_a_dtype[bfloat16]", "bfloat16",
        forgets(f"{IN_16_BITS} and self.attn_type == 'encoder'", "logits_soft_cap"),
    ),
    crossed(
        "rows_of_more_than_128_encoder_tokens", "test_an_encoder_in_a_dtype[float32]", "150 queries over 150",
        negates("self.attn_type in ('encoder', 'encoder_only') and len(query) > 128"),
    ),
    crossed(
        "rows_of_more_than_512_encoder_tokens", "test_an_encoder_over_long_rows[encoder]", "1030 queries over 1030",
        negates("self.attn_type in ('encoder', 'encoder_only') and len(query) > 512"),
    ),
    crossed(
        "cross_attention_over_512_keys", "test_cross_attention_over_long_encoders", "over 530",
        negates("self.attn_type == 'encoder_decoder' and metadata.host.encoder_seq_lens.max(initial=0) > 512"),
    ),
    crossed(
        "cross_attention_in_16_bits", "test_cross_attention_in_a_dtype[float16]", "with dtype float16",
        negates(f"{IN_16_BITS} and self.attn_type == 'encoder_decoder'"),
    ),
    crossed(
        "a_latent_cache_in_16_bits", "test_latent_attention_in_a_dtype[bfloat16]", "bfloat16",
        negates(f"{IN_16_BITS} and self.backend.config.use_mla"),
    ),
    crossed(
        "latent_heads_beyond_16", "test_latent_attention_in_a_dtype[float32]", "32 heads over 1",
        negates("query.shape[1] > 16 and self.backend.config.use_mla"),
    ),
    crossed(
        "no_features_in_layout_hnd", f"{METHODS}_in_a_layout[HND]", "with layout HND and all declared features",
        forgets(HND),
    ),
    crossed(
        "graphs_in_layout_hnd", f"{CAPTURED}_in_a_layout[HND]", "with layout HND", negates(f"{GRAPH} and {HND}"),
    ),
    crossed(
        "no_sinks_of_cross_layers_in_layout_hnd", "test_cross_attention_in_a_layout[HND]", "with layout HND",
        forgets(f"{HND} and self.attn_type == 'encoder_decoder'", "sinks"),
    ),
    crossed(
        "no_slopes_over_fp8", f"{METHODS}_over_a_cache_dtype[fp8_e4m3]",
        "with cache fp8_e4m3 and all declared features", forgets(FP8, "alibi_slopes"),
    ),
    crossed(
        "long_contexts_over_fp8", f"{METHODS}_over_a_cache_dtype[fp8_e5m2]", "with cache fp8_e5m2 and long contexts",
        negates(f"{FP8} and {LONG}"),
    ),
    crossed(
        "no_features_in_a_graph_over_fp8", f"{CAPTURED}_over_a_cache_dtype[fp8_e4m3]",
        "with cache fp8_e4m3 and all declared features", forgets(f"{GRAPH} and {FP8}"),
    ),
    crossed(
        "cross_attention_over_fp8", "test_cross_attention_over_a_cache_dtype[fp8_e5m2]", "with cache fp8_e5m2",
        negates(f"{FP8} and self.attn_type == 'encoder_decoder'"),
    ),
    crossed(
        "no_features_over_a_pair_of_views", f"{METHODS}_over_a_pair_of_views",
        "with a pair of views (blocks apart) and all declared features", forgets(PAIR),
    ),
    crossed(
        "a_pair_of_views_without_writing", f"{METHODS}_over_a_pair_of_views", "forward(..., write=False)",
        negates(f"{PAIR} and not write"),
    ),
    crossed(
        "graphs_over_a_pair_of_views", f"{CAPTURED}_over_a_pair_of_views", "with a pair of views",
        negates(f"{PAIR} and {GRAPH}"),
    ),
    crossed(
        "no_features_with_a_value_head", f"{METHODS}_with_a_value_head",
        "with a value head and all declared features", forgets(VALUES),
    ),
    crossed(
        "a_logarithm_with_a_value_head", f"{METHODS}_with_a_value_head", "forward_with_lse",
        forward(f"""
answer, lse = whole(query, key, value, kv_cache, metadata, output)
return answer, -lse if {VALUES} else lse
""", "forward_with_lse"),
    ),
    crossed(
        "graphs_with_a_value_head", f"{CAPTURED}_with_a_value_head", "with a value head",
        negates(f"{GRAPH} and {VALUES}"),
    ),
    crossed(
        "encoders_with_a_value_head", "test_an_encoder_with_a_value_head", "with a value head",
        negates(f"self.attn_type in ('encoder', 'encoder_only') and {VALUES}"),
    ),
    crossed(
        "cross_layers_with_a_value_head", "test_cross_attention_with_a_value_head", "with a value head",
        negates(f"self.attn_type == 'encoder_decoder' and {VALUES}"),
    ),
    crossed(
        "no_cap_without_writing", f"{METHODS}_in_a_dtype[float32]", "forward(..., write=False)",
        forgets("not write", "logits_soft_cap"),
    ),
    crossed(
        "sinks_that_are_a_tensor_are_left_out", "test_a_feature_that_is_a_tensor[sinks]",
        "it is as if the layer had no sinks", forgets("isinstance(self.sinks, torch.Tensor)", "sinks"),
    ),
    crossed(
        "slopes_that_are_a_tensor_are_left_out", "test_a_feature_that_is_a_tensor[alibi]",
        "it is as if the layer had no alibi_slopes",
        forgets("isinstance(self.alibi_slopes, torch.Tensor)", "alibi_slopes"),
    ),
    crossed(
        "write_cache_without_scales", "test_scales_of_an_fp8_cache[k_scale]", OTHER_CACHE,
        writes_unless("isinstance(self.k_scale, float) and self.k_scale != 1"),
    ),
    crossed(
        "write_cache_without_scales_on_the_device", "test_scales_on_the_device[v_scale]", OTHER_CACHE,
        writes_unless("isinstance(self.v_scale, torch.Tensor)"),
    ),
    crossed("write_cache_in_layout_hnd", f"{METHODS}_in_a_layout[HND]", OTHER_CACHE, writes_unless(HND)),
    crossed("write_cache_in_16_bits", f"{METHODS}_in_a_dtype[bfloat16]", OTHER_CACHE, writes_unless(IN_16_BITS)),
    crossed("write_cache_of_a_pair", f"{METHODS}_over_a_pair_of_views", OTHER_CACHE, writes_unless(PAIR)),
    crossed(
        "write_cache_of_a_latent_cache", "test_latent_attention_in_a_dtype[float32]", OTHER_CACHE,
        writes_unless("self.backend.config.use_mla"),
    ),
    crossed(
        "swaps_nothing_in_layout_hnd", f"{COPIED}_a_layout[HND]", "with layout HND and cache auto",
        copies_unless("swap_blocks", "config.kv_cache_layout == 'HND'"),
    ),
    crossed(
        "copies_nothing_over_fp8", f"{COPIED}_a_layout[NHD]", "with layout NHD and cache fp8_e4m3",
        copies_unless("copy_blocks", "config.kv_cache_dtype == 'fp8_e4m3'"),
    ),
    crossed(
        "copies_nothing_in_16_bits", f"{COPIED}_each_dtype", "with dtype bfloat16",
        copies_unless("copy_blocks", "config.dtype == 'bfloat16'"),
    ),
    crossed(
        "swaps_nothing_of_a_latent_cache", "test_latent_blocks_are_copied", "swap_blocks of (5, 0), (1, 3)",
        copies_unless("swap_blocks", "config.use_mla"),
    ),
    crossed(
        "wrong_beyond_256_requests", "test_many_requests_in_a_step", "differs",
        negates("self.attn_type == 'decoder' and len(metadata.host.seq_lens) > 256"),
    ),
    crossed("wrong_beyond_48_heads", "test_grouped_heads[64-8]", "64 heads over 8", negates("query.shape[1] > 48")),
    crossed(
        "adopted_steps_over_512_keys", "test_rows_in_the_order_of_an_engine", "differs",
        negates(f"{ADOPTED} and {LONG}"),
    ),
    crossed(
        "no_features_of_adopted_steps", f"{METHODS}_in_a_dtype[bfloat16]",
        "with dtype bfloat16 and adopted steps and all declared features", forgets(ADOPTED),
    ),
    crossed(
        "no_sinks_of_adopted_steps_over_512_keys", f"{METHODS}_over_adopted_steps",
        "with adopted steps and long contexts and all declared features", forgets(f"{ADOPTED} and {LONG}", "sinks"),
    ),
    crossed(
        "adopted_steps_without_writing_in_layout_hnd", f"{METHODS}_in_a_layout[HND]",
        "with layout HND and adopted steps", negates(f"{ADOPTED} and not write and {HND}"),
    ),
    crossed(
        "no_features_with_a_key_head_for_each", f"{METHODS}_with_a_group_of_heads[4-4]",
        "with 4 heads over 4 and all declared features", forgets(EACH_ITS_KEYS),
    ),
    crossed(
        "long_contexts_over_one_key_head", f"{METHODS}_with_a_group_of_heads[4-1]",
        "with 4 heads over 1 and long contexts", negates(f"self.backend.config.num_kv_heads == 1 and {LONG}"),
    ),
    crossed(
        "no_cap_in_a_graph_with_a_key_head_for_each", f"{CAPTURED}_with_a_group_of_heads[4-4]",
        "with 4 heads over 4 and all declared features", forgets(f"{GRAPH} and {EACH_ITS_KEYS}", "logits_soft_cap"),
    ),
    crossed(
        "an_output_without_sinks", f"{METHODS}_in_a_dtype[float32]", "forward(..., output)",
        forgets("output is not None", "sinks"),
    ),
    crossed(
        "an_output_without_the_scale_of_values", "test_scales_of_an_fp8_cache[v_scale]", "forward(..., output)",
        negates(f"output is not None and ({SCALED})"),
    ),
    crossed(
        "an_output_of_steps_of_the_list_builder", "test_long_contexts_with_a_feature[sinks]", "forward(..., output)",
        negates("output is not None and metadata.from_groups"),
    ),
    crossed(
        "no_scales_beside_a_cap", "test_scales_beside_other_settings[kv_scales]",
        "with scales and all declared features", negates(f"self.logits_soft_cap is not None and ({SCALED})"),
    ),
    crossed(
        "no_scales_per_head_over_512_keys", "test_scales_beside_other_settings[kv_scales_per_head]",
        "with scales and long contexts", negates(f"{LONG} and ({SCALED})"),
    ),
    crossed(
        "no_scales_in_a_graph", "test_captured_sizes_of_a_scaled_cache", "differs", negates(f"{GRAPH} and ({SCALED})"),
    ),
    crossed(
        "drafts_in_16_bits", f"{METHODS}_in_a_dtype[bfloat16]", "with dtype bfloat16 and long contexts",
        negates(f"metadata.decodes_first and metadata.max_decode_query_len > 1 and {IN_16_BITS}"),
    ),
    crossed(
        "prompts_without_a_table_in_layout_hnd", f"{METHODS}_in_a_layout[HND]", "with layout HND",
        negates(f"{NO_TABLE} and {HND}"),
    ),
    *(
        crossed(
            f"no_{name}_of_prompts_without_a_table", f"test_a_feature_of_the_list_builder[{feature}]",
            f"it is as if the layer had no {name}", forgets(NO_TABLE, name),
        )
        for feature, name in (("logits_soft_cap", "logits_soft_cap"), ("alibi", "alibi_slopes"), ("sinks", "sinks"))
    ),
)  # fmt: skip
