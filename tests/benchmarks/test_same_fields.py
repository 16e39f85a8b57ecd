"""The ways that are timed against each other give the same fields."""

import baselines
import builders
import pytest
import shapes

FIELDS = {
    "slot_mapping": "slot_mapping", "positions": "positions", "query_start_loc": "query_start_loc",
    "seq_start_loc": "seq_start_loc", "paged_kv_indptr": "indptr", "seq_lens": "seq_lens",
    "context_lens": "context_lens", "paged_kv_last_page_len": "last_page_len",
    "logits_indices": "logits_indices",
}  # fmt: skip


@pytest.mark.parametrize("way", [baselines.Vectorised, baselines.Tuned])
@pytest.mark.parametrize("rows", [shapes.decodes(8), shapes.prefills(8, 1024), shapes.mixed()])
def test_numpy_builds_what_the_persistent_builder_builds(way, rows):
    _, builder, scheduled = builders.persistent(rows)
    numpy = way(rows, shapes.BLOCK_SIZE, sum(row.query_len for row in rows))
    for _ in range(1 if scheduled else 40):
        metadata = builder.build(scheduled)
        total, num_decodes, (max_query_len, max_seq_len), token_to_req = numpy.step()
        assert (metadata.num_tokens, metadata.num_decodes) == (total, num_decodes)
        assert (metadata.max_query_len, metadata.max_seq_len) == (max_query_len, max_seq_len)
        assert metadata.token_to_req_indices.tolist() == token_to_req.tolist()
        for field, name in FIELDS.items():
            assert getattr(metadata, field).tolist() == getattr(numpy, name)[: len(getattr(metadata, field))].tolist()


@pytest.mark.parametrize("block_sizes", [shapes.SAME_SIZES, shapes.OTHER_SIZES, shapes.ODD_SIZES])
@pytest.mark.parametrize("step", ["step", "step_sharing"])
def test_numpy_builds_what_the_groups_have(block_sizes, step):
    rows = shapes.decodes(8, headroom=0)
    builder = builders.in_groups(rows, block_sizes)
    numpy = baselines.VectorisedGroups(rows, shapes.in_groups(rows, block_sizes), block_sizes)
    for _ in range(40):
        metadata = builder.build()
        getattr(numpy, step)()
        for of_group, one in zip(metadata.groups.values(), numpy.passes, strict=True):
            for field in ("slot_mapping", "paged_kv_indptr", "paged_kv_last_page_len"):
                assert getattr(of_group, field).tolist() == getattr(one, FIELDS[field]).tolist(), field
