"""The list builder on both implementations: the oracle's fields for steps that are right, equal refusals for others."""

import oracles
from builder.lists.test_builder import steps, to_groups
from fuzz.budget import examples
from fuzz.hostile import Recipe, fixed, integers, mostly, objects, sequences
from fuzz.outcomes import outcome, plain
from hypothesis import given
from hypothesis import strategies as st

from attncore.builder import CommonMetadataBuilder, Sequence, SequenceGroup
from attncore.builder.fields import FIELDS

BOTH = ("cython", "numba")
small = mostly(st.integers(0, 20), integers)
table = mostly(st.none() | st.lists(st.integers(0, 40), max_size=8), sequences)
flag = mostly(st.booleans(), integers)
sequence = st.tuples(small, mostly(st.just(1) | st.integers(1, 9), integers), small, table)
group = st.tuples(flag, st.lists(sequence, min_size=1, max_size=3), mostly(st.just(False), integers))
encoder = st.tuples(mostly(st.none() | st.integers(0, 9), integers), table)
options = st.fixed_dictionaries(
    {"block_size": mostly(st.sampled_from([1, 3, 4, 2**30]), integers)},
    optional={
        "layout": st.sampled_from(["common", "flash", "flashinfer", "rocm", "?", None, 1]).map(fixed),
        "sliding_window": mostly(st.integers(1, 12), integers),
        "chunked_prefill": flag,
        "max_seq_len_to_capture": mostly(st.integers(1, 64), integers),
        "encoder_decoder": flag,
        "max_encoder_seq_len_to_capture": mostly(st.integers(1, 64), integers),
    },
)


def made(recipe, call):
    return recipe(call) if isinstance(recipe, Recipe) else recipe


def groups_of(drawn, extra, call):
    """New groups for one implementation; a drawn object may stand in place of a group or of all of them."""
    if isinstance(drawn, Recipe):
        return drawn(call)
    groups = []
    for one, (length, cross) in zip(drawn, extra, strict=True):
        if isinstance(one, Recipe):
            groups.append(one(call))
            continue
        is_prompt, sequences, hit = one
        listed = [Sequence(*(made(value, call) for value in values)) for values in sequences]
        groups.append(
            SequenceGroup(made(is_prompt, call), listed, made(hit, call), made(length, call), made(cross, call))
        )
    return groups


def fields(metadata):
    host = metadata.host
    return {name: plain(getattr(host, name, None)) for name in FIELDS} | {"num_tokens": metadata.num_tokens}


@examples(120)
@given(step=steps())
def test_a_step_is_the_oracles(step):
    groups, block_size, layout, window, chunked, pad, capture = step
    for kernels in BOTH:
        builder = CommonMetadataBuilder(
            block_size, layout, sliding_window=window, chunked_prefill=chunked, max_seq_len_to_capture=capture,
            kernels=kernels,
        )  # fmt: skip
        metadata = builder.build(to_groups(groups), pad)
        for name, expected in oracles.list_step(*step).items():
            value = getattr(metadata, name)
            assert (value.tolist() if hasattr(value, "tolist") else value) == expected, name


@examples(250)
@given(options=options, drawn=st.lists(group | objects, min_size=1, max_size=3) | objects, data=st.data())
def test_hostile_groups(options, drawn, data):
    count = len(drawn) if isinstance(drawn, list) else 0
    extra = data.draw(
        st.lists(encoder if data.draw(st.booleans()) else st.just((None, None)), min_size=count, max_size=count)
    )
    pad = data.draw(mostly(st.integers(-1, 3), integers))
    outcomes = []
    for kernels in BOTH:
        found = outcome(CommonMetadataBuilder, kernels=kernels, **{name: one() for name, one in options.items()})
        if found[0] == "answer":
            builder = found[1]

            def again(builder=builder):
                outcome(builder.build, [SequenceGroup(False, [Sequence(0, 1, 0, [1])])])

            found = outcome(builder.build, groups_of(drawn, extra, again), pad(again))
            found = ("answer", fields(found[1])) if found[0] == "answer" else found
            after = outcome(builder.build, [SequenceGroup(False, [Sequence(0, 1, 0, [1])])])
            assert after[0] == "answer" or builder.encoder_decoder, "the builder is no longer of use"
        outcomes.append(found)
    assert outcomes[0] == outcomes[1]
