"""Faults of a layer's features, heads and scale; each names the test that must find it."""

from testing.faulty_backend import Fault, forward, init

FEATURE_FAULTS = (
    Fault("no_window", "test_window_off_by_one", "sliding_window", init("features['sliding_window'] = None")),
    Fault(
        "window_too_wide",
        "test_window_off_by_one",
        "it is as if the window were W + 1",
        init("features['sliding_window'] = features['sliding_window'] and features['sliding_window'] + 1"),
    ),
    Fault(
        "window_of_more_than_24_too_wide",
        "test_window_off_by_one[129]",
        "it is as if the window were W + 1",
        init("w = features['sliding_window']; features['sliding_window'] = w and w + (w > 24)"),
    ),
    Fault(
        "window_too_narrow",
        "test_window_off_by_one",
        "sliding_window",
        init("features['sliding_window'] = features['sliding_window'] and max(1, features['sliding_window'] - 1)"),
    ),
    Fault(
        "no_cap",
        "test_a_feature_over_random_batches[logits_soft_cap]",
        "logits_soft_cap 1.5",
        init("features['logits_soft_cap'] = None"),
    ),
    Fault("no_sinks", "test_a_feature_over_random_batches[sinks]", "differs", init("features['sinks'] = None")),
    Fault(
        "sinks_of_the_making",
        "test_sinks_set_after_the_layer_is_made[tensor]",
        "it is as if its features were those of the layer before set_sinks",
        """
from dataclasses import replace
def init(self, backend, layer_name, **features):
    super(Impl, self).__init__(backend, layer_name, **features)
    if self.sinks is not None:
        self._scoring = replace(self._scoring, sinks=self._scoring.sinks.clone())
Impl.__init__ = init
""",
    ),
    Fault(
        "equal_sinks_share_a_tensor",
        "test_sinks_set_after_the_layer_is_made",
        "set_sinks changed the sinks of another layer",
        """
def init(self, backend, layer_name, **features):
    sinks = features.get("sinks")
    if sinks is not None:
        features["sinks"] = vars(backend).setdefault("sinks", {}).setdefault(tuple(sinks.tolist()), sinks)
    super(Impl, self).__init__(backend, layer_name, **features)
Impl.__init__ = init
""",
    ),
    Fault(
        "sinks_of_the_capture",
        "test_captured_sizes_see_sinks_that_are_set",
        "it is as if its features were those of the layer before set_sinks",
        """
from dataclasses import replace
def attend(self, scoring, tensors, kv_cache, metadata, output, *, write):
    if metadata.use_cuda_graph and scoring.sinks is not None:
        held = self.__dict__.setdefault("held", {})
        scoring = replace(scoring, sinks=held.setdefault(metadata.num_reqs, scoring.sinks.clone()))
    return super(Impl, self)._attend(scoring, tensors, kv_cache, metadata, output, write=write)
Impl._attend = attend
""",
    ),
    Fault(
        "own_slopes",
        "test_alibi_slopes_in_any_order",
        "head",
        init(
            "n = backend.config.num_heads; features['alibi_slopes'] = features['alibi_slopes'] and "
            "[2.0 ** (-8 * i / n) for i in range(1, n + 1)]"
        ),
    ),
    Fault(
        "own_scale",
        "test_scale",
        "it is as if the scale were 1 / sqrt(head_size), not the layer's own, 0.7",
        init("features['scale'] = backend.config.head_size ** -0.5"),
    ),
    Fault(
        "interleaved_heads",
        "test_grouped_heads[4-2]",
        "it is as if query head h read key/value head h % num_kv_heads",
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
        "no_maximum_in_the_softmax",
        "test_scores_whose_exponential_is_no_float32[large]",
        "the output holds NaN",
        forward(
            """
answer = whole(query, key, value, kv_cache, metadata, output)
if kv_cache is not None:
    _, lse = super(Impl, self).forward_with_lse(query, key, value, kv_cache, metadata, write=False)
    answer[: len(lse)][lse[: len(answer)] > 88] = torch.nan
return answer
"""
        ),
    ),
    Fault(
        "a_maximum_of_0_or_more",
        "test_scores_whose_exponential_is_no_float32[small]",
        "differs",
        forward(
            """
answer = whole(query, key, value, kv_cache, metadata, output)
if kv_cache is not None:
    _, lse = super(Impl, self).forward_with_lse(query, key, value, kv_cache, metadata, write=False)
    answer[: len(lse)][lse[: len(answer)] < -87] = 0.0
return answer
"""
        ),
    ),
    Fault(
        "a_cap_by_exponentials_that_are_too_large",
        "test_scores_whose_exponential_is_no_float32[large]",
        "the output holds NaN",
        forward("""
answer = whole(query, key, value, kv_cache, metadata, output)
if kv_cache is not None and self.logits_soft_cap is not None:
    most = query.float().abs().amax() * self.backend.config.head_size * self.scale / self.logits_soft_cap
    answer[:1] = answer[:1] + torch.where(most > 88, torch.nan, 0.0)
return answer
"""),
    ),
    Fault(
        "wrong_with_groups_of_5_or_7",
        "test_grouped_heads[14-2]",
        "differs",
        forward(
            """
group = query.shape[1] // self.backend.config.num_kv_heads
return whole(query, key, value, kv_cache, metadata, output).mul_(2 if group in (5, 7) else 1)
"""
        ),
    ),
    Fault(
        "wrong_beyond_32_heads",
        "test_grouped_heads[40-8]",
        "differs",
        forward(
            """
answer = whole(query, key, value, kv_cache, metadata, output)
answer[:, 32:] *= 2
return answer
"""
        ),
    ),
    Fault(
        "wrong_beyond_128_requests",
        "test_many_requests_in_a_step",
        "differs",
        forward(
            """
answer = whole(query, key, value, kv_cache, metadata, output)
if metadata.num_reqs > 128:
    answer[metadata.query_start_loc[128] :] *= 2
return answer
"""
        ),
    ),
    Fault(
        "wrong_with_one_head",
        "test_grouped_heads[1-1]",
        "1 head over 1",
        forward("return whole(query, key, value, kv_cache, metadata, output).div_(1 + (query.shape[1] == 1))"),
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
        "one_plan_for_all_windows",
        "test_layers_that_differ_in_every_declared_feature",
        "of 17 that share a step, and differ",
        """
def plan_layers(self, metadata, key):
    metadata.kept.setdefault("window", key.sliding_window)
Backend.plan_layers = plan_layers
"""
        + forward(
            """
from dataclasses import replace
if "window" in metadata.kept:
    self._scoring = replace(self._scoring, sliding_window=metadata.kept["window"])
return whole(query, key, value, kv_cache, metadata, output)
"""
        ),
    ),
    Fault(
        "one_window_for_all_that_have_one",
        "test_two_layers_with_other_values",
        "it is as if its features were those of layer",
        forward(
            """
from dataclasses import replace
if self._scoring.sliding_window:
    window = metadata.kept.setdefault("window", self._scoring.sliding_window)
    self._scoring = replace(self._scoring, sliding_window=window)
return whole(query, key, value, kv_cache, metadata, output)
"""
        ),
    ),
    Fault(
        "tables_kept_by_the_number_of_a_step",
        "test_layers_of_two_cache_groups",
        "differs",
        forward(
            """
tables = self.backend.__dict__.setdefault("tables", {})
if metadata.builder is None or metadata.use_cuda_graph:
    return whole(query, key, value, kv_cache, metadata, output)
if metadata.step not in tables:
    tables.clear()
table = tables.setdefault(metadata.step, np.array(metadata.host.block_table))
return whole(query, key, value, kv_cache, changed(metadata, block_table=table), output)
"""
        ),
    ),
    Fault(
        "keys_of_the_first_layer_kept_with_the_step",
        "test_layers_that_differ_in_every_declared_feature",
        "it is as if the keys were those of layer 0's cache",
        forward(
            """
if kv_cache is None or metadata.from_groups or not write:
    return whole(query, key, value, kv_cache, metadata, output)
self.write_cache(key, value, kv_cache, metadata)
kept = metadata.kept.setdefault("cache", kv_cache)
return super(Impl, self).forward(query, None, None, kept, metadata, output, write=False)
"""
        ),
    ),
)
