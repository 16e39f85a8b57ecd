"""Faults of a backend that writes to metadata, which other layers and later steps read."""

from testing.faulty_backend import Fault, forward

CHECK = "test_lengths_around_a_block"


def _after(write):
    return forward(f"found = whole(query, key, value, kv_cache, metadata, output)\n{write}\nreturn found")


def _plan(write):
    return f"""
def plan_layers(self, metadata, key):
    {write}
Backend.plan_layers = plan_layers
"""


METADATA_FAULTS = (
    Fault("adds_to_lengths", CHECK, "forward changed metadata", _after("metadata.seq_lens.add_(1)")),
    Fault("clears_the_table", CHECK, "forward changed metadata", _after("metadata.block_table.zero_()")),
    Fault("moves_positions", CHECK, "forward changed metadata", _after("metadata.positions.sub_(1)")),
    Fault(
        "sorts_slots",
        CHECK,
        "forward changed metadata",
        _after("metadata.slot_mapping.copy_(metadata.slot_mapping.flip(0))"),
    ),
    Fault(
        "replaces_an_array",
        CHECK,
        "forward changed metadata",
        _after("metadata.host.seq_lens = metadata.host.seq_lens + 1"),
    ),
    Fault("counts_tokens_itself", CHECK, "forward changed metadata.num_decodes", _after("metadata.num_decodes += 1")),
    Fault("plans_in_the_steps_lengths", CHECK, "plan changed metadata", _plan("metadata.seq_lens.add_(1)")),
    Fault("plans_other_counts", CHECK, "plan changed metadata.max_seq_len", _plan("metadata.max_seq_len += 1")),
)
