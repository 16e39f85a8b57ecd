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
