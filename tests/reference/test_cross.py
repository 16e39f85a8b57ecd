"""Cross attention: every query sees all encoder tokens of its row, those of this step or those in the cache."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from reference.encoder_cases import changed, make_cross

from attncore.reference import causal as paged_attention

PROMPTS = [(9, True, 5), (1, True, 1), (4, True, 12)]
DECODES = [(8, False, 1), (13, False, 1), (1, False, 3)]
FEATURES = {
    "plain": {},
    "cap": {"logits_soft_cap": 1.5},
    "sinks": {"sinks": [0.5, -1.0, 2.0, 0.0]},
}


@pytest.mark.parametrize("features", FEATURES.values(), ids=FEATURES)
@pytest.mark.parametrize("rows", [PROMPTS, DECODES, PROMPTS + DECODES, []], ids=["prompts", "decodes", "mixed", "none"])
def test_steps(rows, features):
    make_cross(rows, features=features, padding=2).check()


@settings(max_examples=40, deadline=None)
@given(
    rows=st.lists(st.tuples(st.integers(0, 30), st.booleans(), st.integers(0, 9)), max_size=6),
    features=st.sampled_from(list(FEATURES.values())),
    kv_heads=st.sampled_from([1, 2, 4]),
    block_size=st.sampled_from([1, 3, 16]),
    temporary=st.sampled_from([1, 300, 1 << 20]),
    seed=st.integers(0, 1000),
)
def test_random_steps(rows, features, kv_heads, block_size, temporary, seed):
    sizes = {"num_kv_heads": kv_heads, "block_size": block_size}
    case = make_cross(rows, features=features, seed=seed, padded_rows=seed % 3, **sizes)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(paged_attention, "CPU_ELEMENTS", temporary)
        case.check()


def test_decodes_read_what_the_prompts_wrote():
    case = make_cross([(9, True, 5), (4, True, 1)])
    first = case.forward()
    slots = case.metadata.host.cross_slot_mapping
    table = [(slots[[0, 4, 8]] // 4).tolist(), [slots[9] // 4, 0, 0]]
    later = changed(
        case,
        encoder_query_lens=[0, 0],
        encoder_query_start_loc=[0, 0, 0],
        cross_slot_mapping=[],
        cross_block_table=table,
    )
    second = case.forward(metadata=later, key=None, value=None)
    torch.testing.assert_close(second, first, atol=2e-5, rtol=2e-5)
    torch.testing.assert_close(case.forward(metadata=later, key=case.key[:0], value=case.value[:0]), second)


def test_a_row_without_encoder_tokens_gives_zeros():
    case = make_cross([(5, True, 2), (0, True, 3), (0, False, 1), (6, False, 1)])
    case.check()
    assert not case.forward()[2:6].any()


def test_a_graph_batch_pads_rows_that_have_no_tokens():
    case = make_cross(DECODES, padded_rows=3)
    case.check()
    assert not case.forward()[-3:].any()
    assert case.metadata.host.encoder_seq_lens.tolist() == [8, 13, 1, 1, 1, 1]


def test_a_profiling_run_needs_no_cache():
    case = make_cross(PROMPTS, profiling=True)
    assert case.metadata.host.cross_slot_mapping.tolist() == [-1] * 14
    case.check()
    cache = case.backend.allocate_kv_cache(3)
    case.check(kv_cache=cache)
    assert not cache[:, :-1].any()


def test_values_of_a_size_of_their_own():
    case = make_cross([(9, True, 5), (2, True, 1)], profiling=True, head_size_v=5)
    case.check()


def test_short_dtypes_and_a_given_output():
    case = make_cross(PROMPTS + DECODES, dtype="bfloat16")
    case.check(1e-2)
    output = torch.full_like(case.query, 7.0)
    assert case.forward(output=output) is output


FIELDS = ["encoder_seq_lens", "encoder_query_lens", "encoder_query_start_loc", "cross_slot_mapping", "query_start_loc"]


@pytest.mark.parametrize("name", FIELDS)
def test_a_step_without_encoder_fields_is_refused(name):
    case = make_cross(PROMPTS + DECODES)
    with pytest.raises(ValueError, match=f"^metadata: it has no {name}, which attention of type encoder_decoder reads"):
        case.forward(metadata=changed(case, **{name: None}))


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"encoder_query_lens": [9, 1, 3, 0]}, "row 2 has encoder_seq_lens 4, encoder_query_lens 3, and 4 tokens"),
        ({"encoder_query_lens": [9, 1, 4, 1]}, "row 3 has encoder_seq_lens 8, encoder_query_lens 1, and 0 tokens"),
        ({"encoder_seq_lens": [9, 1, 4, -8]}, "row 3 has encoder_seq_lens -8"),
        ({"encoder_query_start_loc": [0, 9, 11, 14, 14]}, "row 1 has encoder_seq_lens 1, encoder_query_lens 1, and 2"),
        ({"encoder_seq_lens": [9, 1, 4]}, "encoder_query_lens has 4 rows, but encoder_seq_lens 3"),
        (
            {"encoder_query_start_loc": [0, 9, 10, 14]},
            "encoder_query_start_loc less 1 has 3 rows, but encoder_seq_lens 4",
        ),
        ({"query_start_loc": [0, 5, 6, 18, 18, 19]}, "query_start_loc has 5 rows, but encoder_seq_lens 4"),
        ({"cross_slot_mapping": [4] * 13}, "cross_slot_mapping has 13 slots for the 14 encoder tokens"),
        ({"encoder_seq_lens": [9, 1, 4, 9]}, "block table row 3 has 2 columns, but needs 3 for 9 tokens"),
        (
            {"cross_block_table": [[0, 0]] * 3},
            "the block table has 3 rows, and none for row 3",
        ),
        ({"cross_block_table": [[0, 0]] * 3 + [[1, 99]]}, "the block table names block 99"),
    ],
)
def test_fields_that_do_not_go_together(fields, text):
    case = make_cross([*PROMPTS, (8, False, 1)])
    before = case.cache.clone()
    with pytest.raises(ValueError) as caught:
        case.forward(metadata=changed(case, **fields))
    assert str(caught.value).startswith(f"metadata: {text}")
    if "99" not in text:  # a block that does not exist is found while reading
        torch.testing.assert_close(case.cache, before, equal_nan=True)


def test_no_cache_is_for_profiling_only():
    with pytest.raises(ValueError, match=r"^kv_cache: none given, but cross_slot_mapping has slots"):
        make_cross(PROMPTS).forward(kv_cache=None)
    with pytest.raises(ValueError, match=r"^kv_cache: none given, but row 0 reads 8 tokens of it"):
        make_cross(DECODES).forward(kv_cache=None, key=None, value=None)


@pytest.mark.parametrize("name", ["key", "value"])
def test_tensors_that_do_not_fit(name):
    case = make_cross(PROMPTS)
    tensor = getattr(case, name)
    for wrong in (None, tensor[1:], tensor[..., 1:], tensor[:, 1:], tensor.double()):
        with pytest.raises(ValueError, match=f"^{name}: |^value: " if name == "key" else f"^{name}: "):
            case.forward(**{name: wrong})
    with pytest.raises(ValueError, match=r"^key: None found"):
        case.forward(key=None, value=None)


def test_metadata_of_another_device():
    case = make_cross(PROMPTS)
    for name in ("cross_slot_mapping", "cross_block_table"):
        metadata = changed(case)
        setattr(metadata, name, getattr(metadata.host, name))
        with pytest.raises(ValueError, match=rf"^metadata: {name} is a ndarray"):
            case.forward(metadata=metadata)
