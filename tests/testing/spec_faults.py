"""Faults of the spec: declared and undeclared sizes, features, loading; each names the test that must find it."""

from testing.faulty_backend import Fault, forward, init

# A backend that skips the base class's comparison of its configuration with its spec.
UNCHECKED = """
import dataclasses
def unchecked(self, config):
    ReferenceBackend.__init__(self, dataclasses.replace(config, spec=None))
    self.config, self.name = config, config.spec.name
Backend.__init__ = unchecked
"""

REPLACED = """
import dataclasses
def replaced(self, config):
    ReferenceBackend.__init__(self, dataclasses.replace(config, {}))
Backend.__init__ = replaced
"""
"""A backend that is made for another configuration than the one that it is given."""

SPEC_FAULTS = (
    Fault(
        "head_size_that_raises",
        "test_smallest_and_largest_declared_head_sizes",
        "declares head_size 80",
        init("assert backend.config.head_size != 80, 'head size'"),
        "head_sizes={16, 32, 80}",
    ),
    Fault(
        "head_size_that_is_wrong",
        "test_smallest_and_largest_declared_head_sizes",
        "declares head_size 80",
        forward("return whole(query, key, value, kv_cache, metadata, output).div_(1 + (query.shape[2] == 80))"),
        "head_sizes={16, 32, 80}",
    ),
    Fault(
        "block_size_that_is_wrong",
        "test_smallest_and_largest_declared_block_sizes",
        "declares block_size 8",
        forward("return whole(query, key, value, kv_cache, metadata, output).div_(1 + (kv_cache.shape[2] == 8))"),
    ),
    Fault(
        "head_size_within_that_is_wrong",
        "test_usual_head_sizes_that_are_declared",
        "declares head_size 96",
        forward("return whole(query, key, value, kv_cache, metadata, output).div_(1 + (query.shape[2] == 96))"),
        "head_sizes=MultipleOf(8, 256)",
    ),
    Fault(
        "middle_of_a_set_that_is_wrong",
        "test_usual_head_sizes_that_are_declared",
        "declares head_size 56",
        forward("return whole(query, key, value, kv_cache, metadata, output).div_(1 + (query.shape[2] == 56))"),
        "head_sizes={8, 16, 24, 32, 40, 48, 56, 64, 72, 80, 88}",
    ),
    Fault(
        "head_size_that_is_wrong_beyond_a_tile_of_keys",
        "test_usual_head_sizes_that_are_declared",
        "declares head_size 160",
        forward(
            "wrong = query.shape[2] == 160 and metadata.host.seq_lens.max() > 112\n"
            "return whole(query, key, value, kv_cache, metadata, output).div_(1 + wrong)"
        ),
        "head_sizes=MultipleOf(8, 256)",
    ),
    Fault(
        "head_size_that_is_wrong_without_a_causal_mask",
        "test_cross_attention_with_the_usual_head_sizes",
        "declares head_size 96",
        forward(
            "wrong = query.shape[2] == 96 and self.attn_type == 'encoder_decoder'\n"
            "return whole(query, key, value, kv_cache, metadata, output).div_(1 + wrong)"
        ),
        "head_sizes=MultipleOf(16, 128), features={'encoder_decoder', 'sinks'}",
    ),
    Fault(
        "block_size_within_that_is_wrong",
        "test_usual_block_sizes_that_are_declared",
        "declares block_size 48",
        forward("return whole(query, key, value, kv_cache, metadata, output).div_(1 + (kv_cache.shape[2] == 48))"),
    ),
    Fault(
        "head_size_that_raises_without_a_word",
        "test_smallest_and_largest_declared_head_sizes",
        "declares head_size 80, but: AssertionError without a message (attn_head_size_that_raises_without_a_word_heavy",
        init("assert backend.config.head_size != 80"),
        "head_sizes={16, 32, 80}",
    ),
    Fault(
        "wrong_beyond",
        "test_undeclared_sizes_are_refused_or_right[head_size]",
        "gives wrong results instead of an error",
        UNCHECKED
        + forward("return whole(query, key, value, kv_cache, metadata, output).div_(1 + (query.shape[2] != 16))"),
        "head_sizes={16}",
    ),
    Fault(
        "mute_beyond",
        "test_undeclared_sizes_are_refused_or_right[head_size]",
        "a bare AssertionError",
        UNCHECKED + init("assert backend.config.head_size == 16"),
        "head_sizes={16}",
    ),
    Fault(
        "accepts_anything",
        "test_undeclared_features_are_refused_with_a_sentence[sliding_window-4-sliding_window]",
        "was accepted",
        "Backend.impl = lambda self, layer_name, **given: Impl(self, layer_name, **given)",
        "features=()",
    ),
    Fault(
        "registers_a_plan_key_first",
        "test_a_refused_layer_leaves_nothing_behind",
        "with sliding_window=0 was refused and left a plan key behind",
        """
from attncore import PlanKey
def impl(self, layer_name, **given):
    key = PlanKey(given["scale"], given.get("sliding_window"), None)
    if key.scale == key.scale and key not in self._plan_keys:
        self._plan_keys = (*self._plan_keys, key)
    return ReferenceBackend.impl(self, layer_name, **given)
Backend.impl = impl
""",
    ),
    Fault(
        "keeps_the_layers_it_refuses",
        "test_a_refused_layer_leaves_nothing_behind",
        "with alibi_slopes=per head was refused and left something in the backend's layers",
        init(
            """backend.__dict__.setdefault('layers', []).append(layer_name)
    if features.get('alibi_slopes') is not None:
        raise ValueError('alibi_slopes: the kernel has the standard slopes alone')"""
        ),
        "features={'sliding_window', 'logits_soft_cap', 'alibi_standard', 'sinks'}",
    ),
    Fault(
        "heavy_light",
        "test_the_spec_is_read_without_heavy_imports",
        "reading the spec imported torch",
        light="import torch",
    ),
    Fault("stuck_spec", "test_the_plugin_loads", "no licence file", light="raise RuntimeError('no licence file')"),
    Fault(
        "rounds_its_block_size",
        "test_the_factory_makes_the_backend",
        "created for block_size 4, and its config.block_size is 16",
        REPLACED.format("block_size=16"),
    ),
    Fault(
        "heads_of_its_own",
        "test_the_factory_makes_the_backend",
        "created for num_kv_heads 2, and its config.num_kv_heads is 4",
        REPLACED.format("num_kv_heads=config.num_heads"),
    ),
)
