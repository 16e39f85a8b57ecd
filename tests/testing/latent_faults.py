"""Faults of latent caches alone: plain attention of the same backend is right."""

from testing.faulty_backend import Fault, forward

LATENT = "use_mla=True, head_size_v=MultipleOf(4)"
CAPTURED = "test_latent_captured_sizes_over_changing_"
FP8 = LATENT + ", kv_cache_dtypes={'auto', 'fp8_e4m3'}, features={'kv_scales', 'kv_scales_on_device'}"


def scoring(change: str) -> str:
    """Layers over latent caches whose scores are made otherwise."""
    return f"""
from dataclasses import replace
def init(self, backend, layer_name, **features):
    super(Impl, self).__init__(backend, layer_name, **features)
    if backend.config.use_mla:
        self._scoring = replace(self._scoring, {change})
Impl.__init__ = init
"""


LATENT_FAULTS = (
    Fault(
        "latent_with_the_usual_scale",
        "test_latent_attention_over_random_batches",
        "it is as if the scale were 1 / sqrt(head_size), not the layer's own, 0.7",
        scoring("scale=backend.config.head_size**-0.5"),
        LATENT,
    ),
    *(
        Fault(
            f"latent_without_its_{name}",
            f"test_latent_attention_with_a_feature[{name}]",
            "it is as if the layer had no",
            scoring(f"{name}=None"),
            LATENT,
        )
        for name in ("sliding_window", "logits_soft_cap", "sinks")
    ),
    Fault(
        "latent_and_wrong_after_4000_tokens",
        "test_latent_attention_over_long_contexts",
        "decode of 1 after 4001",
        forward(
            "wrong = value is None and not metadata.num_prefills and metadata.max_seq_len > 4000\n"
            "return whole(query, key, value, kv_cache, metadata, output).div_(1 + wrong)"
        ),
        LATENT,
    ),
    Fault(
        "latent_drafts_see_each_other",
        "test_latent_attention_over_long_contexts",
        "differs from dense",
        forward("""
answer, starts = whole(query, key, value, kv_cache, metadata, output), metadata.host.query_start_loc
if self.backend.config.use_mla and metadata.decodes_first and not metadata.use_cuda_graph:
    for first, last in zip(starts[: metadata.num_decodes], starts[1:]):
        answer[first:last] = answer[first:last].mean(0)
return answer
"""),
        LATENT,
    ),
    Fault(
        "latent_that_reads_the_null_block",
        "test_latent_attention_reads_only_its_own",
        "the output holds NaN",
        forward("""
answer = whole(query, key, value, kv_cache, metadata, output)
return answer + 0 * kv_cache[0].sum() if self.backend.config.use_mla else answer
"""),
        LATENT,
    ),
    Fault(
        "latent_rows_kept_twice",
        "test_the_latent_cache_holds_a_row_a_token",
        "a token owns 32 elements of its block; its latent row has 16",
        """
def kv_cache_shape(self, num_blocks, block_size, num_kv_heads, head_size):
    shape = super(Backend, self).kv_cache_shape(num_blocks, block_size, num_kv_heads, head_size)
    return (*shape[:-1], 2 * shape[-1]) if self.config.use_mla else shape

def kv_cache_views(self, kv_cache):
    size = self.config.head_size
    return super(Backend, self).kv_cache_views(kv_cache[..., :size] if self.config.use_mla else kv_cache)

Backend.kv_cache_shape, Backend.kv_cache_views = kv_cache_shape, kv_cache_views
"""
        + forward("""
size = self.backend.config.head_size
if not self.backend.config.use_mla:
    return whole(query, key, value, kv_cache, metadata, output)
answer = whole(query, key, value, kv_cache[..., :size], metadata, output)
kv_cache[..., size:] = kv_cache[..., :size]
return answer
"""),
        LATENT,
    ),
    Fault(
        "latent_blocks_that_are_not_copied",
        "test_latent_blocks_are_copied",
        "copy_blocks left other keys in block",
        """
def copy_blocks(self, kv_caches, src_to_dst):
    if not self.config.use_mla:
        super(Backend, self).copy_blocks(kv_caches, src_to_dst)
Backend.copy_blocks = copy_blocks
""",
        LATENT,
    ),
    Fault(
        "latent_blocks_copied_twice_where_two_layers_have_the_cache",
        "test_latent_blocks_are_copied",
        "block 3 should hold what block 2 held, in the cache that layers 0, 2 and 3 have together",
        """
def copy_blocks(self, kv_caches, src_to_dst):
    for cache in kv_caches if self.config.use_mla else ():
        self.swap_blocks(cache, cache, src_to_dst)
Backend.copy_blocks = copy_blocks
""",
        LATENT,
    ),
    Fault(
        "latent_scales_ignored",
        "test_latent_caches_in_fp8[number]",
        "must be what was written, for an engine may write it too",
        """
Impl._scales = property(lambda self: (1.0, 1.0) if self.backend.config.use_mla else (self.k_scale, self.v_scale))
""",
        FP8,
    ),
    Fault(
        "latent_graph_with_the_lengths_of_the_capture",
        f"{CAPTURED}batches[1]",
        "decode of 1 after",
        forward("""
lens = metadata.host.seq_lens
if not self.backend.config.use_mla or not metadata.use_cuda_graph or not lens.any():
    return whole(query, key, value, kv_cache, metadata, output)
lens = self.__dict__.setdefault("kept", {}).setdefault(metadata.num_reqs, lens.copy())
return whole(query, key, value, kv_cache, changed(metadata, seq_lens=lens), output)
"""),
        LATENT,
    ),
    Fault(
        "latent_keys_split_by_the_plan_of_the_first_replay",
        f"{CAPTURED}lengths[1]",
        "; the next step is right without a graph: it is as if a plan of an earlier step was replayed",
        forward("""
lens, parts = metadata.host.seq_lens, -(-metadata.host.seq_lens // 256)
if not self.backend.config.use_mla or not metadata.use_cuda_graph or not lens.any():
    return whole(query, key, value, kv_cache, metadata, output)
parts = self.__dict__.setdefault("planned", {}).setdefault(metadata.num_reqs, np.maximum(parts, 1))
whole(query, key, value, kv_cache, metadata, output)
lens = np.minimum(lens, 256 * parts).astype(np.int32)
return whole(query, key, value, kv_cache, changed(metadata, seq_lens=lens), output)
"""),
        LATENT,
    ),
    Fault(
        "latent_log_sum_exp_to_base_2",
        "test_latent_log_sum_exp",
        "it is as if the logarithm were to base 2, not natural",
        forward(
            """
found, lse = whole(query, key, value, kv_cache, metadata, output)
return found, lse / np.log(2) if self.backend.config.use_mla else lse
""",
            "forward_with_lse",
        ),
        LATENT + ", features={'lse'}",
    ),
    Fault(
        "latent_padding_written_to_slot_0",
        "test_latent_padding_changes_no_block[1]",
        "a slot of -1, or a token of padding, writes nothing",
        forward("""
if self.backend.config.use_mla:
    metadata = changed(metadata, slot_mapping=np.maximum(metadata.host.slot_mapping, 0))
return whole(query, key, value, kv_cache, metadata, output)
"""),
        LATENT,
    ),
)
