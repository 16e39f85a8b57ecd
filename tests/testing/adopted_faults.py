"""Faults of adopted steps in captured sizes, of a backend that reads nothing on the host."""

from testing.faulty_backend import Fault, forward

FACTS = "host_needs=set(), host_lengths='none'"


def _on_device(lengths: str = "lens", table: str = "table") -> str:
    """Code of a sound layer that reads the device alone, but for its lengths, ``lens`` the right ones, or its table."""
    return forward(f"""
from types import SimpleNamespace
table, starts, slots = metadata.block_table, metadata.query_start_loc, metadata.slot_mapping
lens = metadata.seq_lens.clone()
lens, table = {lengths}, {table}
rows = [np.ascontiguousarray(one.numpy()) for one in (starts, lens, slots, table)]
host = SimpleNamespace(query_start_loc=rows[0], seq_lens=rows[1], slot_mapping=rows[2], block_table=rows[3])
host.context_lens = (rows[1] - np.diff(rows[0])).clip(0)
given = SimpleNamespace(
    host=host, slot_mapping=slots, num_reqs=len(rows[1]), from_groups=metadata.from_groups,
    block_table=torch.nn.functional.pad(table, (0, 1000)),
)
return whole(query, key, value, kv_cache, given, output)
""")


ADOPTED_FAULTS = (
    Fault(
        "an_adopted_graph_with_the_lengths_of_its_first_replay",
        "test_captured_adopted_steps",
        "decode of 1 after",
        _on_device(
            "lens if not metadata.use_cuda_graph or not lens.any() "
            "else self.__dict__.setdefault('kept', {}).setdefault(len(lens), lens)"
        ),
        FACTS,
    ),
    Fault(
        "a_token_taken_for_one_of_the_row_of_its_number",
        "test_rows_in_the_order_of_an_engine",
        "decode of 1 after",
        forward("""
from types import SimpleNamespace
host, count = metadata.host, metadata.num_tokens
if metadata.use_cuda_graph or metadata.max_query_len > 1 or len(host.seq_lens) == count:
    return whole(query, key, value, kv_cache, metadata, output)
rows = SimpleNamespace(
    query_start_loc=np.arange(count + 1, dtype=np.int32), seq_lens=host.seq_lens[:count],
    context_lens=host.seq_lens[:count] - 1, slot_mapping=host.slot_mapping, block_table=host.block_table[:count],
)
given = SimpleNamespace(
    host=rows, slot_mapping=metadata.slot_mapping, num_reqs=count, from_groups=False,
    block_table=metadata.block_table[:count],
)
return whole(query, key, value, kv_cache, given, output)
"""),
    ),
    Fault(
        "padding_of_an_engine_taken_for_a_row",
        "test_captured_adopted_steps",
        "decode of 1 after",
        _on_device(
            "lens if bool(lens.all()) or not lens.any() or not metadata.use_cuda_graph else lens - (lens > 1).int()"
        ),
        FACTS,
    ),
    Fault(
        "columns_of_a_table_taken_for_the_stride_of_its_rows",
        "test_captured_adopted_steps",
        "decode of 1 after",
        _on_device(table="table.as_strided(table.shape, (table.shape[1], 1))"),
        FACTS,
    ),
)
