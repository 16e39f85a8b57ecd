"""Backends that are the reference but for one fault each, and the test of the kit that must find it."""

from typing import NamedTuple

LIGHT = """
from attncore import BackendSpec, MultipleOf, hookimpl

@hookimpl
def attncore_backend():
    facts = dict(
        name={name!r}, api=1, factory="attn_{name}_heavy:Backend", devices={{"any": 5}},
        dtypes={{"float32", "bfloat16"}}, head_sizes=MultipleOf(8), block_sizes=MultipleOf(4),
        features={{"sliding_window", "logits_soft_cap", "alibi", "sinks", "multi_token_decode"}},
        cuda_graph="uniform_decode",
    )
    facts.update({facts})
    return BackendSpec(**facts)
"""
HEAVY = """
import copy
import numpy as np
import torch
from attncore import AttentionBackend, AttentionImpl
from attncore.reference import ReferenceBackend, ReferenceImpl

def changed(metadata, **fields):
    '''The metadata with host fields replaced, and the device's from them.'''
    found = copy.copy(metadata)
    found.host = copy.copy(metadata.host)
    for name, value in fields.items():
        setattr(found.host, name, value)
        setattr(found, name, torch.from_numpy(np.ascontiguousarray(value)))
    return found

class Impl(ReferenceImpl):
    pass

class Backend(ReferenceBackend):
    impl_class = Impl
"""


class Fault(NamedTuple):
    """``code`` is appended to HEAVY, ``facts`` change the spec; ``test`` fails, and its reason holds ``says``."""

    name: str
    test: str
    says: str
    code: str = ""
    facts: str = ""
    light: str = ""


def forward(body: str, name: str = "forward") -> str:
    """Code that replaces a method; ``whole`` is the sound one."""
    lines = "\n".join(f"    {line}" for line in body.strip().splitlines())
    return f"""
def {name}(self, query, key, value, kv_cache, metadata, output=None):
    whole = super(Impl, self).{name}
{lines}
Impl.{name} = {name}
"""


def _init(body: str) -> str:
    return f"""
def init(self, backend, layer_name, **features):
    {body}
    super(Impl, self).__init__(backend, layer_name, **features)
Impl.__init__ = init
"""


# A backend that skips the base class's comparison of its configuration with its spec.
UNCHECKED = """
import dataclasses
def unchecked(self, config):
    ReferenceBackend.__init__(self, dataclasses.replace(config, spec=None))
    self.config, self.name = config, config.spec.name
Backend.__init__ = unchecked
"""

FAULTS = (
    Fault("no_window", "test_window_off_by_one", "sliding_window", _init("features['sliding_window'] = None")),
    Fault(
        "window_too_wide",
        "test_window_off_by_one",
        "sliding_window",
        _init("features['sliding_window'] = features['sliding_window'] and features['sliding_window'] + 1"),
    ),
    Fault(
        "window_too_narrow",
        "test_window_off_by_one",
        "sliding_window",
        _init("features['sliding_window'] = features['sliding_window'] and max(1, features['sliding_window'] - 1)"),
    ),
    Fault(
        "no_cap",
        "test_a_feature_over_random_batches[logits_soft_cap]",
        "logits_soft_cap 1.5",
        _init("features['logits_soft_cap'] = None"),
    ),
    Fault("no_sinks", "test_a_feature_over_random_batches[sinks]", "differs", _init("features['sinks'] = None")),
    Fault(
        "own_slopes",
        "test_alibi_slopes_in_any_order",
        "head",
        _init(
            "n = backend.config.num_heads; features['alibi_slopes'] = features['alibi_slopes'] and "
            "[2.0 ** (-8 * i / n) for i in range(1, n + 1)]"
        ),
    ),
    Fault("own_scale", "test_scale", "differs", _init("features['scale'] = backend.config.head_size ** -0.5")),
    Fault(
        "writes_minus_one",
        "test_padded_tokens_change_no_block",
        "a slot of -1, or a token of padding, must change no block",
        forward("return whole(query, key, value, kv_cache[:, :-1], metadata, output)"),
    ),
    Fault(
        "ignores_output",
        "test_the_layer_as_a_torch_operator[False]",
        "gave another output",
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
        "writes_in_a_dummy_step",
        "test_captured_sizes_over_changing_batches[1]",
        "must change no block",
        forward("""
if metadata.use_cuda_graph and not metadata.host.seq_lens.any():
    kv_cache[:, 3] += 1
return whole(query, key, value, kv_cache, metadata, output)
"""),
    ),
    Fault(
        "head_size_that_raises",
        "test_smallest_and_largest_declared_head_sizes",
        "declares head_size 80",
        _init("assert backend.config.head_size != 80, 'head size'"),
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
        "block_size_within_that_is_wrong",
        "test_usual_block_sizes_that_are_declared",
        "declares block_size 48",
        forward("return whole(query, key, value, kv_cache, metadata, output).div_(1 + (kv_cache.shape[2] == 48))"),
    ),
    Fault(
        "head_size_that_raises_without_a_word",
        "test_smallest_and_largest_declared_head_sizes",
        "declares head_size 80, but: AssertionError without a message (attn_head_size_that_raises_without_a_word_heavy",
        _init("assert backend.config.head_size != 80"),
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
        UNCHECKED + _init("assert backend.config.head_size == 16"),
        "head_sizes={16}",
    ),
    Fault(
        "assumes_contiguous_keys",
        "test_strided_tensors",
        "with strided tensors",
        forward(
            """
key = torch.as_strided(key, key.shape, (key.shape[1] * key.shape[2], key.shape[2], 1))
return whole(query, key, value, kv_cache, metadata, output)
"""
        ),
    ),
    Fault(
        "assumes_contiguous_heads",
        "test_strided_tensors[gaps]",
        "with strided tensors (gaps",
        forward(
            """
query = torch.as_strided(query, query.shape, (query.stride(0), query.shape[2], 1))
return whole(query, key, value, kv_cache, metadata, output)
"""
        ),
    ),
    Fault(
        "assumes_a_contiguous_output",
        "test_strided_tensors",
        "wrote beside its strided output",
        forward(
            """
answer = whole(query, key, value, kv_cache, metadata)
if output is None:
    return answer
torch.as_strided(output, answer.shape, answer.stride()).copy_(answer)
output.copy_(answer)
return output
"""
        ),
    ),
    Fault(
        "wrong_with_one_head",
        "test_grouped_heads[1-1]",
        "1 heads over 1",
        forward("return whole(query, key, value, kv_cache, metadata, output).div_(1 + (query.shape[1] == 1))"),
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
        forward("return whole(query, key, value, kv_cache, metadata, output).div_(1 + (metadata.num_decodes > 16))"),
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
        "short_ids",
        "test_block_ids_at_the_end_of_the_pool",
        "decode of 1 after",
        forward(
            "return whole(query, key, value, kv_cache, "
            "changed(metadata, block_table=metadata.host.block_table % 32), output)"
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
        "interleaved_heads",
        "test_grouped_heads[4-2]",
        "4 heads over 2",
        forward(
            """
n, kv = query.shape[1], key.shape[1]
order = torch.arange(n).view(n // kv, kv).T.flatten()
answer = whole(query[:, order].contiguous(), key, value, kv_cache, metadata)
back = answer[:, torch.argsort(order)]
return back if output is None else output.copy_(back)
"""
        ),
    ),
    Fault(
        "reads_nobodys_block",
        "test_nothing_is_read_that_no_request_owns",
        "the output holds NaN",
        forward("return whole(query, key, value, kv_cache, metadata, output) + 0 * kv_cache[0, 0].sum()"),
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
        "",
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
        "scales_query",
        "test_prefill",
        "forward changed its argument query",
        forward("return whole(query.mul_(0.5).clone().mul_(2), key, value, kv_cache, metadata, output)"),
    ),
    Fault(
        "other_output",
        "test_output_is_written_where_it_is_asked",
        "",
        forward("return whole(query, key, value, kv_cache, metadata)"),
    ),
    Fault(
        "float_output",
        "test_dtype[bfloat16]",
        "torch.float32",
        forward("return whole(query, key, value, kv_cache, metadata, output).float()"),
    ),
    Fault(
        "last_plan_wins",
        "test_layers_with_different_scales",
        "differs",
        """
def plan_layers(self, metadata, key):
    self.planned = key
Backend.plan_layers = plan_layers
"""
        + forward(
            """
from dataclasses import replace
self._scoring = replace(self._scoring, scale=self.backend.planned.scale)
return whole(query, key, value, kv_cache, metadata, output)
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
        "no_sink",
        "test_the_cache_is_zeroed_and_has_a_sink_block",
        "the 5 blocks and the sink, 6 in all",
        "Backend.allocate_kv_cache = lambda self, n: torch.zeros(self._shape(n), dtype=self.kv_cache_torch_dtype())",
    ),
    Fault(
        "dirty_cache",
        "test_the_cache_is_zeroed_and_has_a_sink_block",
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
        "accepts_anything",
        "test_undeclared_features_are_refused_with_a_sentence[sliding_window-4-sliding_window]",
        "was accepted",
        "Backend._check_declared = lambda self, **asked: None",
        "features=()",
    ),
    Fault(
        "needs_a_table",
        "test_plain_prompts_of_the_list_door",
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
        "reads_padded_rows",
        "test_a_graph_batch_of_the_persistent_door",
        "",
        forward(
            """
if len(np.unique(metadata.host.query_start_loc)) < len(metadata.host.query_start_loc):
    return whole(query, key, value, kv_cache, metadata, output).neg_()
return whole(query, key, value, kv_cache, metadata, output)
"""
        ),
    ),
    Fault(
        "heavy_light",
        "test_the_spec_is_read_without_heavy_imports",
        "reading the spec imported torch",
        light="import torch",
    ),
    Fault("stuck_spec", "test_the_plugin_loads", "no licence file", light="raise RuntimeError('no licence file')"),
)
