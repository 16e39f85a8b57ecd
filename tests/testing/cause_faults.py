"""Faults of rows and calls, whose message names the likely cause (those of features are in feature_faults)."""

from testing.faulty_backend import Fault, forward

CAUSE_FAULTS = (
    Fault(
        "rows_exchanged",
        "test_many_requests_in_a_step",
        "rows or tokens exchanged",
        forward(
            """
answer = whole(query, key, value, kv_cache, metadata, output)
if metadata.num_decodes == 260:
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
if metadata.num_decodes == 260:
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
        "scale_of_the_layer_before",
        "test_layers_that_differ_in_every_declared_feature",
        "; it is as if the scale were that of layer",
        forward(
            """
from dataclasses import replace
scale = metadata.kept.setdefault("scale", self._scoring.scale)
self._scoring = replace(self._scoring, scale=scale)
return whole(query, key, value, kv_cache, metadata, output)
"""
        ),
    ),
    Fault(
        "heads_by_the_number_of_key_heads",
        "test_grouped_heads[6-2]",
        "; it is as if query head h read key/value head h // num_kv_heads, not h // (num_heads // num_kv_heads)",
        forward(
            """
n, kv = query.shape[1], key.shape[1]
if kv == 1 or n == kv:
    return whole(query, key, value, kv_cache, metadata, output)
read = [min(h // kv, kv - 1) for h in range(n)]
groups = [[h for h in range(n) if read[h] == one] for one in range(kv)]
widest = max(map(len, groups))
parts = torch.empty_like(query)
for first in range(widest):  # each key/value head's queries in turn
    some = [one[min(first, len(one) - 1)] for one in groups]
    answer = whole(query[:, [some[h // (n // kv)] for h in range(n)]].contiguous(), key, value, kv_cache, metadata)
    for index, head in enumerate(some):
        parts[:, head] = answer[:, index * (n // kv)]
return parts if output is None else output.copy_(parts)
"""
        ),
    ),
    Fault(
        "one_key_head_for_all",
        "test_grouped_heads[2-2]",
        "; it is as if query head h read key/value head 0, not",
        forward(
            """
if key.shape[1] != 2 or query.shape[1] != 2:
    return whole(query, key, value, kv_cache, metadata, output)
first = whole(query, key, value, kv_cache, metadata)
second = whole(query.flip(1).contiguous(), key, value, kv_cache, metadata)
answer = torch.stack((first[:, 0], second[:, 0]), 1)
return answer if output is None else output.copy_(answer)
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
first = metadata.num_decodes == 260 and not self.__dict__.setdefault("seen", 0)
self.seen = metadata.num_decodes == 260
return answer.mul_(1.5) if first else answer
"""
        ),
    ),
)
