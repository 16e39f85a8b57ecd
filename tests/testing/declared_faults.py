"""Faults in what a spec declares beyond plain attention: features at once, layouts, dtypes, groups, blocks."""

from testing.faulty_backend import Fault, forward, init

DECLARED_FAULTS = (
    Fault(
        "no_cap_beside_sinks",
        "test_all_declared_features_together",
        "differs",
        init("features['sinks'] is not None and features.update(logits_soft_cap=None)"),
    ),
    Fault(
        "standard_slopes_of_twice_the_heads",
        "test_standard_alibi_slopes",
        "differs",
        init(
            "n = backend.config.num_heads; features['alibi_slopes'] = features['alibi_slopes'] and "
            "[2.0 ** (-4 * i / n) for i in range(1, n + 1)]"
        ),
    ),
    Fault(
        "the_last_head_of_a_group_of_16_is_left_out",
        "test_largest_declared_group",
        "differs",
        forward("""
answer = whole(query, key, value, kv_cache, metadata, output)
if query.shape[1] == 16 * self.backend.config.num_kv_heads:
    answer[:, 15] = 0
return answer
"""),
    ),
    Fault(
        "a_cache_of_another_dtype_is_scaled",
        "test_kv_cache_dtype[fp8_e4m3]",
        "differs",
        forward("""
answer = whole(query, key, value, kv_cache, metadata, output)
return answer.mul_(1.5) if self.backend.config.kv_cache_dtype == "fp8_e4m3" else answer
"""),
        "kv_cache_dtypes={'auto', 'fp8_e4m3'}",
    ),
    Fault(
        "head_0_of_layout_hnd_is_left_out",
        "test_kv_cache_layout[HND]",
        "differs",
        forward("""
answer = whole(query, key, value, kv_cache, metadata, output)
if self.backend.config.kv_cache_layout == "HND":
    answer[:, 0] = 0
return answer
"""),
        "kv_cache_layouts=('NHD', 'HND')",
    ),
    Fault(
        "no_limit_of_blocks",
        "test_the_largest_declared_block_id",
        "was accepted; it must be refused",
        """
def allocate_kv_cache(self, num_blocks, *args, **named):
    return torch.zeros(self.kv_cache_shape(num_blocks, self.config.block_size, 1, self.config.head_size))
Backend.allocate_kv_cache = allocate_kv_cache
""",
        "max_block_id=100",
    ),
    Fault(
        "a_layer_forgets_its_name",
        "test_the_factory_makes_the_backend",
        "keeps layer_name and scale",
        """
def impl(self, layer_name, **features):
    made = super(Backend, self).impl(layer_name, **features)
    made.layer_name = "a layer"
    return made
Backend.impl = impl
""",
    ),
    Fault(
        "log_sum_exp_of_encoders_to_base_2",
        "test_log_sum_exp_of_encoders",
        "it is as if the logarithm were to base 2, not natural",
        forward(
            """
answer, lse = whole(query, key, value, kv_cache, metadata, output)
return answer, lse if kv_cache is not None else lse / np.log(2)
""",
            "forward_with_lse",
        ),
        "features={'lse', 'encoder'}",
    ),
)
