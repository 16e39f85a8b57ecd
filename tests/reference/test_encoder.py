"""Attention of encoders: every token sees its whole row, nothing is cached."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from reference.encoder_cases import changed, make_encoder

from attncore.reference import causal as paged_attention

KINDS = ["encoder", "encoder_only"]
SLOPES = [0.5, 0.25, 0.125, 0.0625]
FEATURES = {
    "plain": {},
    "window": {"sliding_window": 3},
    "cap": {"logits_soft_cap": 1.5},
    "alibi": {"alibi_slopes": SLOPES},
    "sinks": {"sinks": [0.5, -1.0, 2.0, 0.0]},
    "all": {"sliding_window": 6, "logits_soft_cap": 3.0, "alibi_slopes": SLOPES, "sinks": [0.0, 1.0, -1.0, 0.3]},
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("features", FEATURES.values(), ids=FEATURES)
def test_rows_of_many_lengths(kind, features):
    make_encoder([5, 1, 17, 4, 8], kind=kind, features=features, padding=3).check()


@settings(max_examples=40, deadline=None)
@given(
    kind=st.sampled_from(KINDS),
    lengths=st.lists(st.integers(0, 30), max_size=6),
    features=st.sampled_from(list(FEATURES.values())),
    kv_heads=st.sampled_from([1, 2, 4]),
    size_v=st.sampled_from([None, 5]),
    temporary=st.sampled_from([1, 300, 1 << 20]),
    seed=st.integers(0, 1000),
)
def test_random_rows(kind, lengths, features, kv_heads, size_v, temporary, seed):
    sizes = {"num_kv_heads": kv_heads, "head_size_v": size_v}
    case = make_encoder(lengths, kind=kind, features=features, seed=seed, padding=seed % 3, **sizes)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(paged_attention, "CPU_ELEMENTS", temporary)
        case.check()


@pytest.mark.parametrize("kind", KINDS)
def test_a_window_is_symmetric(kind):
    case = make_encoder([9], kind=kind, features={"sliding_window": 3})
    before = case.forward()
    for token in (2, 8):  # three and more away from token 5
        case.key[token], case.value[token] = 9, 99
    torch.testing.assert_close(case.forward()[5], before[5])
    case.value[7] += 1
    assert (case.forward()[5] - before[5]).abs().max() > 0.01


@pytest.mark.parametrize("kind", KINDS)
def test_a_cache_that_is_given_stays_as_it_is(kind):
    case = make_encoder([5, 3], kind=kind)
    cache = case.backend.allocate_kv_cache(4).fill_(torch.nan)
    case.check(kv_cache=cache)
    assert cache.isnan().all()


def test_short_dtypes_and_a_given_output():
    case = make_encoder([5, 3, 12], dtype="bfloat16")
    case.check(1e-2)
    output = torch.full_like(case.query, 7.0)
    assert case.forward(output=output) is output


def test_a_step_of_decodes_has_no_encoder_tokens():
    make_encoder([0, 0]).check()
    make_encoder([], padding=2).check()


def test_a_step_without_encoder_input_is_refused():
    case = make_encoder([5, 3])
    metadata = changed(case, encoder_query_start_loc=None)
    with pytest.raises(
        ValueError, match=r"^metadata: it has no encoder_query_start_loc, which attention of type encoder"
    ):
        case.forward(metadata=metadata)


def test_an_encoder_only_row_comes_whole():
    case = make_encoder([5, 3], kind="encoder_only")
    with pytest.raises(
        ValueError, match=r"^metadata: row 1 has 3 tokens in this step and seq_lens \[4\]; .*comes whole"
    ):
        case.forward(metadata=changed(case, seq_lens=[5, 4]))
    with pytest.raises(ValueError, match=r"^metadata: row 1 has 3 tokens in this step and seq_lens \[\]"):
        case.forward(metadata=changed(case, seq_lens=[5]))
    case.check(metadata=changed(case, query_start_loc=[0, 5, 8, 8], seq_lens=[5, 3, 1]))  # a padded row


@pytest.mark.parametrize("name", ["query", "key", "value"])
def test_tensors_that_do_not_fit(name):
    case = make_encoder([5, 3])
    tensor = getattr(case, name)
    for wrong in (None, tensor[1:], tensor[..., 1:], tensor[:, 1:], tensor.double()):
        with pytest.raises((ValueError, AttributeError), match=f"^{name}: " if wrong is not None else None):
            case.forward(**{name: wrong})
