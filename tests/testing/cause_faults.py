"""Faults whose message names the likely cause."""

from testing.faulty_backend import Fault, forward, init

CAUSE_FAULTS = (
    Fault(
        "window_one_too_wide",
        "test_window_off_by_one",
        "it is as if the window were W + 1",
        init("features['sliding_window'] = features.get('sliding_window') and features['sliding_window'] + 1"),
    ),
    Fault(
        "scale_of_its_own",
        "test_scale",
        "it is as if the scale were 1 / sqrt(head_size), not the layer's own, 0.7",
        init("features['scale'] = backend.config.head_size ** -0.5"),
    ),
    Fault(
        "plan_of_another_layer",
        "test_two_layers_with_other_values",
        "it is as if its features were those of layer",
        """
def plan_layers(self, metadata, key):
    self.planned = key
Backend.plan_layers = plan_layers
"""
        + forward(
            """
from dataclasses import replace
self._scoring = replace(self._scoring, sliding_window=self.backend.planned.sliding_window)
return whole(query, key, value, kv_cache, metadata, output)
"""
        ),
    ),
    Fault(
        "heads_modulo",
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
        "rows_exchanged",
        "test_many_requests_in_a_step",
        "rows or tokens exchanged",
        forward(
            """
answer = whole(query, key, value, kv_cache, metadata, output)
if metadata.num_decodes == 40:
    answer[:2] = answer[:2].flip(0)
return answer
"""
        ),
    ),
    Fault(
        "table_of_another_row",
        "test_many_requests_in_a_step",
        "read the keys of request",
        forward(
            """
if metadata.num_decodes == 40:
    table, lens = metadata.host.block_table.copy(), metadata.host.seq_lens.copy()
    table[0], lens[0] = table[1], lens[1]
    whole(query, key, value, kv_cache, metadata, output)
    metadata = changed(metadata, block_table=table, seq_lens=lens)
return whole(query, key, value, kv_cache, metadata, output)
"""
        ),
    ),
    Fault(
        "newest_key_unseen",
        "test_lengths_around_a_block",
        "it is as if the request's newest key were not seen",
        forward(
            """
if metadata.num_decodes and not metadata.num_prefills:
    whole(query, key, value, kv_cache, metadata, output)
    metadata = changed(metadata, seq_lens=metadata.host.seq_lens - 1)
return whole(query, key, value, kv_cache, metadata, output)
"""
        ),
    ),
    Fault(
        "keeps_something_for_one_call",
        "test_many_requests_in_a_step",
        "it is right when forward is called again",
        forward(
            """
answer = whole(query, key, value, kv_cache, metadata, output)
first = metadata.num_decodes == 40 and not self.__dict__.setdefault("seen", 0)
self.seen = metadata.num_decodes == 40
return answer.mul_(1.5) if first else answer
"""
        ),
    ),
)
