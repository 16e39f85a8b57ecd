"""Faults of encoders, cross attention and latent caches, and the test of the kit that must find each."""

from testing.faulty_backend import Fault, forward

ENCODER = "features={'encoder', 'sliding_window'}"
CROSS = "features={'encoder_decoder', 'sinks'}"
LATENT = "use_mla=True, head_size_v=MultipleOf(4)"
USUAL_SCALE = "scale=backend.config.head_size**-0.5"


def scoring(kind: str, change: str) -> str:
    return f"""
from dataclasses import replace
def init(self, backend, layer_name, **features):
    super(Impl, self).__init__(backend, layer_name, **features)
    if self.attn_type == {kind!r}:
        self._scoring = replace(self._scoring, {change})
Impl.__init__ = init
"""


ENCODER_FAULTS = (
    Fault(
        "causal_encoder",
        "test_an_encoder_over_random_rows[encoder]",
        "queries over",
        scoring("encoder", "causal=True"),
        ENCODER,
    ),
    Fault(
        "causal_encoder_only",
        "test_an_encoder_over_random_rows[encoder_only]",
        "queries over",
        scoring("encoder_only", "causal=True"),
        ENCODER,
    ),
    Fault(
        "encoder_without_its_window",
        "test_a_feature_of_an_encoder[sliding_window]",
        "sliding_window 6",
        scoring("encoder", "sliding_window=None"),
        ENCODER,
    ),
    Fault(
        "encoder_with_the_usual_scale",
        "test_an_encoder_over_random_rows[encoder]",
        "it is as if the scale were 1 / sqrt(head_size), not the layer's own, 0.7",
        scoring("encoder", USUAL_SCALE),
        ENCODER,
    ),
    Fault(
        "cross_layer_with_the_usual_scale",
        "test_cross_attention_of_the_persistent_builder",
        "it is as if the scale were 1 / sqrt(head_size), not the layer's own, 0.7",
        scoring("encoder_decoder", USUAL_SCALE),
        CROSS,
    ),
    Fault(
        "encoder_that_mixes_rows",
        "test_an_encoder_over_random_rows[encoder]",
        "queries over",
        forward(
            """
if self.attn_type == "encoder":
    ends = metadata.host.encoder_query_start_loc[[0, -1]]
    metadata = changed(metadata, encoder_query_start_loc=ends)
return whole(query, key, value, kv_cache, metadata, output)
"""
        ),
        ENCODER,
    ),
    *(
        Fault(
            f"{kind}_that_reads_the_table_it_finds",
            f"test_an_encoder_of_the_persistent_builder[{kind}]",
            "queries over",
            forward(
                f"""
answer = whole(query, key, value, kv_cache, metadata, output)
has_table = self.attn_type == "{kind}" and bool(metadata.block_table.shape[1]) and not metadata.from_groups
return answer.zero_() if has_table else answer
"""
            ),
            ENCODER,
        )
        for kind in ("encoder", "encoder_only")
    ),
    Fault(
        "encoder_that_writes",
        "test_an_encoder_writes_no_cache[encoder_only]",
        "changed its cache",
        forward(
            """
if self.attn_type == "encoder_only" and kv_cache is not None:
    kv_cache[0, 3, 0] = key[0]
return whole(query, key, value, kv_cache, metadata, output)
"""
        ),
        ENCODER,
    ),
    Fault(
        "cross_that_forgets",
        "test_cross_attention_of_the_persistent_builder",
        "wrote nothing to slot",
        forward(
            """
cross = self.attn_type == "encoder_decoder"
return whole(query, key, value, kv_cache.clone() if cross else kv_cache, metadata, output)
"""
        ),
        CROSS,
    ),
    Fault(
        "cross_one_token_short",
        "test_cross_attention_of_the_list_builder",
        "1 query over",
        forward(
            """
if self.attn_type == "encoder_decoder" and key is None:
    metadata = changed(metadata, encoder_seq_lens=np.maximum(metadata.host.encoder_seq_lens - 1, 1))
return whole(query, key, value, kv_cache, metadata, output)
"""
        ),
        CROSS,
    ),
    Fault(
        "cross_that_reads_beside",
        "test_cross_attention_reads_only_its_own",
        "the output holds NaN",
        forward(
            """
answer = whole(query, key, value, kv_cache, metadata, output)
return answer + 0 * kv_cache[0, 0].sum() if self.attn_type == "encoder_decoder" else answer
"""
        ),
        CROSS,
    ),
    Fault(
        "cross_without_an_encoder",
        "test_rows_without_encoder_tokens_give_zeros",
        "3 queries over 0 encoder tokens",
        forward(
            """
answer = whole(query, key, value, kv_cache, metadata, output)
if self.attn_type == "encoder_decoder":
    starts = metadata.host.query_start_loc
    for row in np.flatnonzero(metadata.host.encoder_seq_lens == 0):
        answer[starts[row] : starts[row + 1]] = float("nan")
return answer
"""
        ),
        CROSS,
    ),
    Fault(
        "cross_without_sinks",
        "test_cross_attention_with_a_feature[sinks]",
        "sinks",
        scoring("encoder_decoder", "sinks=None"),
        CROSS,
    ),
    Fault(
        "latent_values_elsewhere",
        "test_latent_attention_over_random_batches",
        "differs from dense",
        forward(
            """
answer = whole(query, key, value, kv_cache, metadata, output)
return answer.roll(1, dims=2) if value is None else answer
"""
        ),
        LATENT,
    ),
    Fault(
        "latent_that_needs_values",
        "test_latent_attention_over_random_batches",
        "'NoneType' object has no attribute 'shape'",
        forward("return whole(query, key, value, kv_cache, metadata, output).div_(len(value.shape) // 3)"),
        LATENT,
    ),
    Fault(
        "value_size_that_is_wrong",
        "test_sizes_of_a_value_head",
        "declares head_size_v 4",
        forward(
            """
size = 4 if value is None else value.shape[2]
return whole(query, key, value, kv_cache, metadata, output).div_(1 + (size == 4))
"""
        ),
        LATENT,
    ),
    Fault(
        "undeclared_encoders_accepted",
        "test_undeclared_features_are_refused_with_a_sentence[attn_type-encoder-encoder]",
        "was accepted",
        "Backend.impl = lambda self, layer_name, **given: Impl(self, layer_name, **given)",
    ),
)
