"""Faults of a backend that writes to metadata, which other layers and later steps read."""

from textwrap import indent

from testing.faulty_backend import Fault, forward

CHECK = "test_lengths_around_a_block"


def _after(write):
    return forward(f"found = whole(query, key, value, kv_cache, metadata, output)\n{write}\nreturn found")


def _plan(write):
    body = indent(write, "    ")
    return f"""
def plan_layers(self, metadata, key):
{body}
Backend.plan_layers = plan_layers
"""


_NEEDS = "host_needs={'query_start_loc', 'seq_lens', 'context_lens', 'slot_mapping'}, device_needs={'slot_mapping', "
CLEARS_ON_THE_HOST = """
import warnings
with warnings.catch_warnings():  # torch's, of an array that cannot be written to
    warnings.simplefilter("ignore")
    torch.from_numpy(metadata.host.block_table).zero_()
"""
NEEDS = _NEEDS + "'block_table'}"
"""What the reference reads of a decoder's step."""

METADATA_FAULTS = (
    Fault(
        "reads_positions_undeclared",
        CHECK,
        "it reads metadata.positions, which its spec does not declare; add 'positions' to device_needs",
        forward("metadata.positions\nreturn whole(query, key, value, kv_cache, metadata, output)"),
        NEEDS,
    ),
    Fault(
        "asks_the_host_for_an_undeclared_field",
        CHECK,
        "it reads metadata.host.query_lens, which its spec does not declare; add 'query_lens' to host_needs",
        forward("hasattr(metadata.host, 'query_lens')\nreturn whole(query, key, value, kv_cache, metadata, output)"),
        NEEDS,
    ),
    Fault(
        "reads_an_undeclared_field_of_a_view",
        CHECK,
        "it reads metadata.seq_lens, which its spec does not declare",
        forward(
            "(metadata.prefill_metadata or metadata.decode_metadata).seq_lens\n"
            "return whole(query, key, value, kv_cache, metadata, output)"
        ),
        NEEDS,
    ),
    Fault(
        "plans_with_an_undeclared_field",
        CHECK,
        "it reads metadata.host.positions, which its spec does not declare",
        _plan("metadata.host.positions"),
        NEEDS,
    ),
    Fault(
        "plans_a_builders_step_with_an_undeclared_field",
        "test_steps_of_a_builder_that_uses_its_metadata_again",
        "it reads metadata.page_buffer, which its spec does not declare; add 'paged_kv_indices' to device_needs",
        _plan("if metadata.builder is not None: metadata.page_buffer"),
        NEEDS,
    ),
    Fault(
        "adds_to_lengths_undeclared",
        CHECK,
        "forward changed metadata.seq_lens; other layers and later steps read it: work on a copy (nor does its spec",
        _after("metadata.seq_lens.add_(1)"),
        NEEDS,
    ),
    Fault(
        "plans_in_undeclared_lengths",
        CHECK,
        "plan changed metadata.positions; other layers and later steps read it: work on a copy (nor does its spec",
        _plan("metadata.positions.zero_()"),
        NEEDS,
    ),
    Fault("adds_to_lengths", CHECK, "forward changed metadata", _after("metadata.seq_lens.add_(1)")),
    Fault("clears_the_table", CHECK, "forward changed metadata", _after("metadata.block_table.zero_()")),
    Fault(
        "clears_the_table_on_the_host",
        CHECK,
        "forward changed metadata.host.block_table; other layers and later steps read it: work on a copy",
        _after(CLEARS_ON_THE_HOST),
    ),
    Fault(
        "plans_in_the_table_on_the_host",
        CHECK,
        "plan changed metadata.host.block_table; other layers and later steps read it: work on a copy",
        _plan(CLEARS_ON_THE_HOST),
    ),
    Fault(
        "plans_in_the_table_of_a_builder",
        "test_steps_of_a_builder_that_uses_its_metadata_again",
        "plan changed metadata.host.block_table; other layers and later steps read it",
        _plan("if metadata.builder is None:\n    return" + CLEARS_ON_THE_HOST),
    ),
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
    Fault(
        "plans_in_the_lengths_of_a_builder",
        "test_steps_of_a_builder_that_uses_its_metadata_again",
        "plan changed metadata.host.seq_lens; other layers and later steps read it",
        _plan("if metadata.builder is not None: metadata.seq_lens.add_(1)"),
    ),
    Fault(
        "moves_an_encoders_rows",
        "test_an_encoder_over_random_rows[encoder]",
        "forward changed metadata.host.encoder_query_start_loc",
        _after("if self.attn_type == 'encoder': metadata.encoder_query_start_loc.add_(1)"),
        "features={'encoder'}",
    ),
    Fault(
        "moves_an_encoders_rows_undeclared",
        "test_an_encoder_over_random_rows[encoder_only]",
        "forward changed metadata.seq_lens",
        _after("if self.attn_type == 'encoder_only': metadata.seq_lens.zero_()"),
        "features={'encoder'}, host_needs=TABLES, device_needs=TABLES - {'seq_lens'}",
    ),
    Fault(
        "clears_slots_without_writing",
        "test_a_layer_attends_without_writing[another layer-None]",
        "forward changed metadata",
        _after("if not write: metadata.slot_mapping.fill_(-1)"),
    ),
    Fault(
        "sorts_lengths_with_the_log_sum_exp",
        "test_log_sum_exp_over_random_batches",
        "forward changed metadata",
        forward(
            "found = whole(query, key, value, kv_cache, metadata, output)\nmetadata.seq_lens.sub_(1)\nreturn found",
            "forward_with_lse",
        ),
        "features={'lse'}",
    ),
    Fault("plans_other_counts", CHECK, "plan changed metadata.max_seq_len", _plan("metadata.max_seq_len += 1")),
)
