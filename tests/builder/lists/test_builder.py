"""The list builder against the plain-Python oracle, and what it refuses."""

import contextlib

import numpy as np
import oracles
import pytest
from builder.lists.decodes import backend
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from attncore import BackendConfig
from attncore.builder import CommonMetadataBuilder, Sequence, SequenceGroup
from attncore.builder.lists.builder import _new_arrays
from attncore.kernels import load_kernels

LAYOUTS = ("common", "flash", "flashinfer", "rocm")
quick = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@st.composite
def steps(draw):
    """A legal step: (groups, block_size, layout, window, chunked, pad, capture)."""
    block_size = draw(st.sampled_from([1, 2, 3, 4, 16, 2**30, 2**31 - 1]))
    layout = draw(st.sampled_from(LAYOUTS))
    window = draw(st.none() | st.integers(1, 20) | st.sampled_from([2**30, 2**31 - 1]))
    chunked = draw(st.booleans())
    graph = draw(st.booleans())
    groups = []
    for is_prompt in sorted(draw(st.lists(st.booleans(), min_size=1, max_size=5)), reverse=True):
        if graph and is_prompt:
            continue
        hit = is_prompt and window is None and draw(st.booleans())
        profile = draw(st.integers(0, 9)) == 0
        sequences = []
        for _ in range(draw(st.integers(1, 2))):
            query_len = draw(st.integers(1, 12)) if is_prompt or (layout == "flash" and draw(st.booleans())) else 1
            context_len = draw(st.integers(0, 30)) if not is_prompt or chunked or hit else 0
            needed = oracles.cdiv(query_len + context_len, block_size)
            lookahead = draw(st.integers(0, 2)) if block_size <= 16 else 0
            table = draw(st.lists(st.integers(0, 2**31 - 1), min_size=needed + lookahead, max_size=needed + lookahead))
            sequences.append((query_len, context_len, None if profile else table))
        groups.append((is_prompt, hit, sequences))
    if not groups:
        groups = [(False, False, [(1, 0, [1] * 1)])]
    longest = max(q + c for _, _, seqs in groups for q, c, _ in seqs)
    pad, capture = (draw(st.integers(0, 3)), min(longest + 3 * block_size, 2**31 - 1)) if graph else (-1, None)
    return groups, block_size, layout, window, chunked, pad, capture


def to_groups(groups, kind=list):
    return [
        SequenceGroup(
            is_prompt, [Sequence(i, q, c, None if t is None else kind(t)) for i, (q, c, t) in enumerate(seqs)], hit
        )
        for is_prompt, hit, seqs in groups
    ]


def as_int64(table):
    return np.array(table, np.int64)


def as_int32(table):
    return np.array(table, np.int32)


@quick
@given(step=steps(), kind=st.sampled_from([list, tuple, as_int64, as_int32]))
def test_every_field_is_the_oracles(kernels, step, kind):
    groups, block_size, layout, window, chunked, pad, capture = step
    builder = CommonMetadataBuilder(
        block_size, layout, sliding_window=window, chunked_prefill=chunked, max_seq_len_to_capture=capture,
        kernels=kernels,
    )  # fmt: skip
    metadata = builder.build(to_groups(groups, kind), pad)
    for name, expected in oracles.list_step(*step).items():
        value = getattr(metadata, name)
        assert (value.tolist() if isinstance(value, np.ndarray) else value) == expected, name


def decode(**fields):
    whole = {"seq_id": 0, "query_len": 1, "context_len": 3, "block_table": [5]} | fields
    return SequenceGroup(False, [Sequence(**whole)])


def prompt(hit=False, **fields):
    return SequenceGroup(
        True, [Sequence(**{"seq_id": 0, "query_len": 4, "context_len": 0, "block_table": [5]} | fields)], hit
    )


BAD = [
    ([], "groups: empty"),
    (None, "groups: None is not a list"),
    ([7], r"groups\[0\]: int is not a SequenceGroup"),
    ([SequenceGroup(1, [])], r"groups\[0\].is_prompt: 1 is not true or false"),
    ([SequenceGroup(True, [], None)], r"groups\[0\].prefix_cache_hit: None is not"),
    ([SequenceGroup(True, [])], r"groups\[0\].sequences: empty"),
    ([SequenceGroup(True, "ab")], r"groups\[0\].sequences: str is not a list"),
    ([SequenceGroup(True, [3])], r"groups\[0\].sequences\[0\]: int is not a Sequence"),
    ([decode(query_len=0)], r"groups\[0\].sequences\[0\].query_len: 0 is outside 1\.\."),
    ([decode(query_len=True)], r"query_len: True is not an integer"),
    ([decode(context_len=-1)], r"context_len: -1 is outside 0\.\."),
    ([decode(context_len=2**31)], r"context_len: 2147483648 is outside"),
    ([decode(context_len=2**31 - 1)], r"query_len: 1 on top of context_len 2147483647 does not fit int32"),
    ([decode(context_len=1.5)], r"context_len: 1.5 is not an integer"),
    ([decode(seq_id="x")], r"seq_id: 'x' is not an integer"),
    ([decode(seq_id=2**63)], r"seq_id: 9223372036854775808 does not fit 64 bits"),
    ([decode(block_table=[5, -1])], r"block_table: block id -1 at index 1 is outside 0\.\.2147483647"),
    ([decode(block_table=[2**31])], r"block_table: block id 2147483648 at index 0"),
    ([decode(block_table=[2**70])], r"block_table: block id \d+ at index 0"),
    ([decode(block_table=[True])], r"block_table: block id True at index 0 is not an integer"),
    ([decode(block_table=["a"])], r"block_table: block id 'a' at index 0 is not an integer"),
    ([decode(block_table=7)], r"block_table: 7 is not a sequence of block ids"),
    ([decode(block_table=np.array([3, -4]))], r"block_table: block id -4 at index 1"),
    ([decode(block_table=np.array([2.5]))], r"block_table: block id 2.5 at index 0 is not an integer"),
    ([decode(context_len=4)], r"sequence 0 holds 1 block but needs 2 for its 5 tokens \(block_size 4\)"),
    ([decode(block_table=[])], r"sequence 0 holds 0 blocks but needs 1 for its 4 tokens"),
    ([prompt(query_len=9)], r"sequence 0 holds 1 block but needs 3 for its 9 tokens"),
    ([decode(), prompt()], r"groups\[1\].is_prompt: a prompt after a decode"),
    ([SequenceGroup(False, [Sequence(0, 1, 3, [5]), Sequence(0, 1, 3, [6])])], r"sequences\[1\].seq_id: 0 stands"),
    ([SequenceGroup(False, [Sequence(0, 1, 3, [5]), Sequence(1, 1, 3, None)])], r"block_table: null and non-null"),
    ([SequenceGroup(False, [Sequence(0, 1, 3, [5])], True)], r"groups\[0\].prefix_cache_hit: true on a decode"),
    ([prompt(), prompt(context_len=1, query_len=2)], r"chunked_prefill: false, but groups\[1\].sequences\[0\]"),
    ([decode(query_len=2, context_len=1)], r"query_len: 2 on a decode; layout common"),
]  # fmt: skip


@pytest.mark.parametrize(("groups", "message"), BAD)
def test_a_bad_step_names_the_field(kernels, groups, message):
    builder = CommonMetadataBuilder(4, kernels=kernels)
    with pytest.raises((ValueError, TypeError), match=message):
        builder.build(groups)
    assert builder.build([decode()]).slot_mapping.tolist() == [23]  # the builder is as good as new


def test_a_hit_excludes_a_window(kernels):
    builder = CommonMetadataBuilder(4, sliding_window=8, kernels=kernels)
    with pytest.raises(ValueError, match=r"groups\[0\].prefix_cache_hit: true with sliding_window 8"):
        builder.build([prompt(hit=True)])


def test_a_graph_batch_holds_decodes_only(kernels):
    builder = CommonMetadataBuilder(4, max_seq_len_to_capture=16, kernels=kernels)
    with pytest.raises(ValueError, match="graph_batch_size: a graph batch holds decodes only"):
        builder.build([prompt()], 0)
    with pytest.raises(ValueError, match="max_seq_len_to_capture: needed"):
        CommonMetadataBuilder(4, kernels=kernels).build([decode()], 0)


def test_answers_are_the_callers_to_keep(kernels):
    builder = CommonMetadataBuilder(4, kernels=kernels)
    first = builder.build([decode(block_table=[5])])
    builder.build([decode(block_table=[6])])
    assert first.slot_mapping.tolist() == [23]
    assert first.block_table.tolist() == [[5]]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"block_size": 0}, "block_size: 0 is below 1"),
        ({"block_size": True}, "block_size: True is not an integer"),
        ({"block_size": 4, "sliding_window": 0}, "sliding_window: 0 is below 1"),
        ({"block_size": 4, "layout": "flsh"}, "layout: 'flsh' is not one of common, flash, flashinfer, rocm"),
        ({"block_size": 4, "kernels": "fortran"}, "kernels: 'fortran' is not one of cython, numba"),
        ({"block_size": 4, "max_seq_len_to_capture": 2**31}, "max_seq_len_to_capture: 2147483648 does not fit"),
    ],
)
def test_bad_arguments_name_themselves(arguments, message):
    with pytest.raises((ValueError, TypeError), match=message):
        CommonMetadataBuilder(**arguments)


def test_a_list_that_shrinks_while_it_is_read_is_not_read_past_its_end(kernels):
    table = [5] * 100

    class Shrinks:
        def __index__(self):
            table.clear()
            return 1

    table[1] = Shrinks()
    builder = CommonMetadataBuilder(4, kernels=kernels)
    with contextlib.suppress(ValueError):  # or what was read before it shrank
        builder.build([decode(context_len=300, block_table=table)])
    assert builder.build([decode()]).slot_mapping.tolist() == [23]


@pytest.mark.parametrize(
    "name",
    [
        "block_size", "dialect", "sliding_window", "chunked_prefill", "max_seq_len_to_capture", "encoder_decoder",
        "max_encoder_seq_len_to_capture", "kernels", "backend",
    ],
)  # fmt: skip
def test_settings_do_not_change(name):
    builder = CommonMetadataBuilder(4)
    with pytest.raises(AttributeError, match=name):
        setattr(builder, name, 0)
    assert builder.build([decode()]).slot_mapping.tolist() == [23]


def test_the_kernels_refuse_a_block_size_and_a_window_that_no_builder_has(kernels):
    reader = load_kernels(kernels).GroupReader()
    assert reader.read([decode()])
    for block_size, window, message in [
        (0, 0, "block_size: 0 is below 1"), (-16, 0, "block_size: -16 is below 1"), (4, -1, "window: -1 is below 0"),
    ]:  # fmt: skip
        with pytest.raises(ValueError, match=message):
            reader.measure(block_size, window, False, False, False)


def test_blocks_of_another_size_than_the_backends_are_refused():
    """Its layers would read other tokens' slots."""
    reference = pytest.importorskip("attncore.reference", reason="torch is not installed")
    backend = reference.ReferenceBackend(BackendConfig(4, 2, 8, "float32", 4))
    for make in (CommonMetadataBuilder, backend.get_builder_cls()):
        with pytest.raises(ValueError, match=r"^block_size: 8 is not the backend's 4; use choice\.block_size"):
            make(8, backend=backend)
        make(4, backend=backend)


@pytest.mark.parametrize("window", [None, 5])
def test_a_step_is_filled_by_the_settings_that_it_was_measured_by(kernels, window):
    """A callback of the garbage collector, or another thread, may change them in between."""
    builder = CommonMetadataBuilder(4, "flashinfer", sliding_window=window, kernels=kernels)
    groups = [SequenceGroup(False, [Sequence(0, 1, 20, [1, 2, 3, 4, 5, 6])])]
    expected = builder.build(groups)

    def allocate(*sizes):
        builder._block_size, builder._sliding_window = 1, 1
        return _new_arrays(*sizes)

    found = builder._build(groups, -1, allocate)
    for name, array in vars(expected.host._arrays).items():
        np.testing.assert_array_equal(getattr(found.host, name), array, name)


def test_decodes_of_several_tokens_whose_window_leaves_out_keys(kernels):
    """Of 18 tokens, the first of three queries sees 8 to 15; the row shows the last 8. NumPy's arrays say so alone."""
    groups = [SequenceGroup(False, [Sequence(0, 3, 15, list(range(1, 10))), Sequence(1, 1, 15, list(range(1, 9)))])]
    for_layers = CommonMetadataBuilder(2, "flash", sliding_window=8, kernels=kernels, backend=backend(2))
    found = CommonMetadataBuilder(2, "flash", sliding_window=8, kernels=kernels).build(groups)
    assert found.seq_lens.tolist() == [8, 8]
    with pytest.raises(
        ValueError, match=r"^groups\[0\].sequences\[0\].query_len: 3 on a decode with sliding_window 8; its"
    ):
        for_layers.build(groups)
    for length in range(1, 12):
        for count in range(1, length + 1):
            group = [SequenceGroup(False, [Sequence(0, count, length - count, list(range(9)))])]
            shown = min(length, 8 + length % 2)
            with (
                contextlib.nullcontext() if shown >= min(length, 7 + count) else pytest.raises(ValueError, match="keys")
            ):
                for_layers.build(group)


class Clears:
    """An integer that clears a list when it is read, or when it is read again."""

    def __init__(self, found, reads=1):
        self.found, self.reads = found, reads

    def __index__(self):
        self.reads -= 1
        if self.reads == 0:
            self.found.clear()
        return 1


def test_groups_that_are_cleared_while_they_are_read(kernels):
    groups = []
    groups += [SequenceGroup(False, [Sequence(0, 1, 3, [Clears(groups)])])] * 2
    step = CommonMetadataBuilder(4, kernels=kernels).build(groups)
    assert groups == []
    assert step.slot_mapping.tolist() == [7, 7]


@pytest.mark.parametrize("context_len", [3, 9])
@pytest.mark.parametrize("encoder_decoder", [False, True])
def test_sequences_that_are_cleared_while_they_are_read(kernels, encoder_decoder, context_len):
    sequences = []
    sequences.append(Sequence(0, 1, context_len, [Clears(sequences)]))
    builder = CommonMetadataBuilder(4, kernels=kernels, encoder_decoder=encoder_decoder)
    with (
        contextlib.suppress(ValueError)
        if context_len == 3 and not encoder_decoder
        else pytest.raises(ValueError, match=r"^groups: changed while they were read")
    ):
        builder.build([SequenceGroup(False, sequences, False, 3 if encoder_decoder else None, [1])])


def test_malformed_sequences_that_are_cleared_while_they_are_looked_at(kernels):
    sequences = []
    sequences += [Sequence(Clears(sequences, 2), 1, 3, [1]), Sequence(0, 0, 3, [1])]
    with pytest.raises(ValueError, match=r"^groups\[0\].sequences\[1\].query_len: 0 is outside"):
        CommonMetadataBuilder(4, kernels=kernels).build([SequenceGroup(False, sequences)])


def test_a_list_that_lies_about_its_items(kernels):
    class Lies(list):
        def __iter__(self):
            return iter([decode()])

    assert CommonMetadataBuilder(4, kernels=kernels).build(Lies()).slot_mapping.tolist() == [23]


def test_what_stands_behind_a_number_that_is_none_is_not_asked(kernels):
    class Stops:
        def __index__(self):
            raise KeyboardInterrupt

    with pytest.raises(ValueError, match="query_len: 9223372036854775808 is outside"):
        CommonMetadataBuilder(4, kernels=kernels).build([SequenceGroup(False, [Sequence(0, 2**63, Stops(), None)])])


def test_what_lies_about_being_a_bool_is_none(kernels):
    class FakeBool:
        __class__ = bool

        def __bool__(self):
            raise KeyboardInterrupt

    sequences = [Sequence(0, 1, 0, [1])]
    for group in (SequenceGroup(FakeBool(), sequences), SequenceGroup(False, sequences, FakeBool())):
        with pytest.raises(TypeError, match=r"^groups\[0\]\.\w+: .* is not true or false"):
            CommonMetadataBuilder(4, kernels=kernels).build([group])


class LongList(list):
    """Says that it holds 2**40 items, for which no memory is there."""

    def __len__(self):
        return 2**40


class LongTuple(tuple):
    __len__ = LongList.__len__


@pytest.mark.parametrize("kind", [LongList, LongTuple])
def test_sequences_that_lie_about_how_many_they_are(kernels, kind):
    """They are read as what they hold, where they are right and where they are refused."""
    builder = CommonMetadataBuilder(4, kernels=kernels)
    right, short = Sequence(0, 1, 3, [5]), Sequence(1, 1, 4, [5])
    assert builder.build([SequenceGroup(False, kind([right]))]).slot_mapping.tolist() == [23]
    with pytest.raises(ValueError, match=r"^groups\[0\].sequences\[1\].block_table: sequence 1 holds 1 block but"):
        builder.build([SequenceGroup(False, kind([right, short]))])
    with pytest.raises(ValueError, match=r"^groups\[0\].sequences: empty"):
        builder.build([SequenceGroup(False, kind())])


def test_an_encoder_length_of_any_group_needs_an_encoder_builder(kernels):
    groups = [decode(), SequenceGroup(False, [Sequence(0, 1, 3, [5])], False, 3)]
    with pytest.raises(ValueError, match=r"^groups\[1\].encoder_seq_len: given to a builder that was not made with"):
        CommonMetadataBuilder(4, kernels=kernels).build(groups)
