"""Placeholders of groups: the maps of a step by modality, against maps made a token at a time, and what is refused."""

import copy
import sys
import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from attncore import BackendConfig
from attncore.builder import (
    BatchSlice,
    CommonMetadataBuilder,
    ContextParallel,
    Placeholder,
    Sequence,
    SequenceGroup,
    slice_metadata,
)
from attncore.reference import ReferenceBackend

KERNELS = ["cython", "numba"]
IMAGE, SOUND = Placeholder(0, 2, 6), Placeholder(0, 9, 2)


def table_for(length):
    return list(range(1, 2 + length // 4))


@st.composite
def group(draw, is_prompt):
    """A group whose prompt has ranges of two modalities in turn, in chunks, behind a prefix hit, or decoding."""
    found, offset, counts = {}, 0, {"image": 0, "audio": 0}
    for _ in range(draw(st.integers(0, 4))):
        modality = draw(st.sampled_from(["image", "audio"]))
        offset += draw(st.integers(0, 3))
        length, interrupted = draw(st.integers(1, 6)), counts[modality] and draw(st.booleans())
        item = counts[modality] - 1 if interrupted else counts[modality]
        start = draw(st.integers(0, 3))
        found.setdefault(modality, []).append(Placeholder(item, offset, length, start))
        counts[modality] = item + 1
        offset += length
    placeholders = {name: draw(st.permutations(ranges)) for name, ranges in found.items()}
    context, query = draw(st.integers(0, 20)), draw(st.integers(1, 20)) if is_prompt else 1
    sequences = [Sequence(i, query, context, table_for(context + query)) for i in range(draw(st.integers(1, 2)))]
    hit = is_prompt and context > 0 and draw(st.booleans())
    return SequenceGroup(is_prompt, sequences, hit, placeholders=placeholders or draw(st.sampled_from([None, {}])))


@st.composite
def steps(draw):
    kinds = sorted(draw(st.lists(st.booleans(), min_size=1, max_size=4)), reverse=True)
    return [draw(group(is_prompt)) for is_prompt in kinds]


def oracle(groups):
    """Modality -> tokens as (token, row, item, row of its embeddings, row of all embeddings of the step)."""
    expected, sizes, token, row = {}, {}, 0, 0
    for index, (_, sequences, _, _, _, placeholders) in enumerate(groups):
        for modality in placeholders or {}:
            expected.setdefault(modality, [])
        for sequence in sequences:
            for position in range(sequence.context_len, sequence.context_len + sequence.query_len):
                for modality, ranges in (placeholders or {}).items():
                    for item, offset, length, start in ranges:
                        if offset <= position < offset + length:
                            before = sizes.setdefault(modality, {})
                            rows = max(one[3] + one[2] for one in ranges if one[0] == item)
                            before.setdefault((index, item), (sum(n for _, n in before.values()), rows))
                            embedding = start + position - offset
                            source = before[index, item][0] + embedding
                            expected[modality].append((token, row, item, embedding, source))
                token += 1
            row += 1
    return expected


def columns(one):
    return list(zip(*(part.tolist() for part in (*one[:4], one.source_indices)), strict=True))


@pytest.mark.parametrize("kernels", KERNELS)
@settings(max_examples=150, deadline=None)
@given(groups=steps())
def test_every_token_of_the_step_takes_its_own_row(kernels, groups):
    metadata = CommonMetadataBuilder(4, chunked_prefill=True, kernels=kernels).build(groups)
    wanted = oracle(groups)
    assert {name: columns(one) for name, one in metadata.placeholder_maps.items()} == wanted
    assert metadata.multi_modal_placeholder_index_maps == {
        name: ([one[4] for one in rows], [one[0] for one in rows]) for name, rows in wanted.items()
    }
    for one in metadata.placeholder_maps.values():
        unrolled = [
            (token, run.req_index, run.item, run.embedding_start + token - run.token_start)
            for run in one.runs
            for token in range(run.token_start, run.token_stop)
        ]
        assert unrolled == [row[:4] for row in columns(one)]


@settings(max_examples=100, deadline=None)
@given(groups=steps(), data=st.data())
def test_a_view_has_the_rows_of_its_own_tokens(groups, data):
    metadata = CommonMetadataBuilder(4, chunked_prefill=True).build(groups)
    starts = metadata.host.query_start_loc.tolist()
    first = data.draw(st.integers(0, metadata.num_reqs - 1))
    last = data.draw(st.integers(first + 1, metadata.num_reqs))
    views = [
        (metadata.prefill_metadata, 0, metadata.num_prefills),
        (metadata.decode_metadata, metadata.num_prefills, metadata.num_reqs),
        (
            slice_metadata(metadata, BatchSlice(first, last, starts[first], starts[last])),
            first,
            last,
        ),
    ]
    for view, low, high in views:
        if view is None:
            continue
        start, stop = starts[low], starts[high]
        wanted = {
            name: [(token - start, row - low, *rest) for token, row, *rest in rows if start <= token < stop]
            for name, rows in oracle(groups).items()
        }
        found = {name: columns(one) for name, one in view.placeholder_maps.items()}
        assert found == {name: rows for name, rows in wanted.items() if rows}
        for name, one in view.placeholder_maps.items():
            runs = [
                (token, run.req_index, run.item, run.embedding_start + token - run.token_start)
                for run in one.runs
                for token in range(run.token_start, run.token_stop)
            ]
            assert runs == [row[:4] for row in found[name]]


def step(placeholders, query_len=12, context_len=0, more=()):
    length = query_len + context_len
    first = SequenceGroup(True, [Sequence(0, query_len, context_len, table_for(length))], placeholders=placeholders)
    return CommonMetadataBuilder(4, chunked_prefill=True).build([first, *more])


def test_a_prompt_of_text_before_one_with_an_image_counts():
    """In the first generation the tokens of a prompt without the modality were not counted."""
    groups = [
        SequenceGroup(True, [Sequence(0, 5, 0, [1, 2])]),
        SequenceGroup(True, [Sequence(0, 8, 0, [3, 4])], placeholders={"image": [IMAGE]}),
    ]
    maps = CommonMetadataBuilder(4).build(groups).multi_modal_placeholder_index_maps
    assert maps == {"image": ([0, 1, 2, 3, 4, 5], [7, 8, 9, 10, 11, 12])}


def test_chunks_of_a_prompt_take_each_row_once():
    rows = []
    for context, query in ((0, 4), (4, 3), (7, 5)):
        one = step({"image": [IMAGE]}, query, context).placeholder_maps["image"]
        rows += one.embedding_indices.tolist()
    assert rows == list(range(6))


def test_a_step_without_placeholders_has_no_map():
    for none in (None, {}):
        metadata = step(none)
        assert metadata.placeholder_maps == {}
        assert metadata.multi_modal_placeholder_index_maps == {}
    metadata = step({"image": [IMAGE]}, 2, 20)  # a modality that this step does not reach
    assert metadata.placeholder_maps["image"].token_indices.tolist() == []
    assert metadata.multi_modal_placeholder_index_maps == {"image": ([], [])}


def test_a_step_that_advances_takes_no_embedding():
    metadata = step({"image": [IMAGE]})
    before = copy.copy(metadata)
    metadata.advance_step(np.zeros(12, np.int64), np.zeros(1, np.int64), 1, turn_prefills_into_decodes=True)
    assert metadata.placeholder_maps == {}
    assert before.placeholder_maps["image"].token_indices.tolist() == [2, 3, 4, 5, 6, 7]
    # The last chunk of a prompt may run as a decode: of its token, too, the next one takes none.
    one = SequenceGroup(False, [Sequence(0, 1, 7, [1, 2, 3])], placeholders={"image": [IMAGE]})
    metadata = CommonMetadataBuilder(4).build([one])
    assert metadata.placeholder_maps["image"].embedding_indices.tolist() == [5]
    metadata.advance_step(np.zeros(1, np.int64), np.zeros(1, np.int64), 1)
    assert metadata.placeholder_maps == {}


def lines_of(function):
    """How many lines of attncore a call runs."""
    count = 0

    def trace(frame, event, argument):
        nonlocal count
        count += event == "line"
        return trace if "attncore" in frame.f_code.co_filename else None

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        function()
    finally:
        sys.settrace(before)
    return count


def items_in_a_prompt(n):
    ranges = [Placeholder(item, 2 * item, 1) for item in range(n)]
    return [SequenceGroup(True, [Sequence(0, 2 * n, 0, table_for(2 * n))], placeholders={"image": ranges})]


def sequences_of_many_items(n):
    ranges = [Placeholder(item, 2 * item, 1) for item in range(n)]
    sequences = [Sequence(index, 1, 2 * index, table_for(2 * index + 1)) for index in range(n)]
    return [SequenceGroup(True, sequences, True, placeholders={"image": ranges})]


def sequences_of_many_modalities(n):
    ranges = {f"m{item}": [Placeholder(0, 2 * item, 1)] for item in range(n)}
    return [sequences_of_many_items(n)[0]._replace(placeholders=ranges)]


@pytest.mark.parametrize("groups_of", [items_in_a_prompt, sequences_of_many_items, sequences_of_many_modalities])
def test_twice_as_many_placeholders_take_twice_as_long(groups_of):
    """Some thousands took minutes: every one was looked at for every other, or for every sequence."""
    few, many = groups_of(60), groups_of(240)
    builder = CommonMetadataBuilder(4, "flash", chunked_prefill=True)
    assert lines_of(lambda: builder.build(many)) < 6 * lines_of(lambda: builder.build(few))


@pytest.mark.parametrize("kernels", KERNELS)
def test_a_step_that_is_refused_is_not_in_the_buffers_of_a_graph(kernels):
    backend = ReferenceBackend(BackendConfig(4, 2, 8, "float32", block_size=4, device="cpu"))
    builder = CommonMetadataBuilder(4, max_seq_len_to_capture=64, backend=backend, kernels=kernels)
    state = backend.get_state_cls()(backend, builder)
    with state.graph_capture(max_batch_size=2):
        captured = state.metadata_for_capture(2)
    state.build([SequenceGroup(False, [Sequence(0, 1, 5, [1, 2])])], 1)
    before = captured.slot_mapping.tolist(), captured.seq_lens.tolist()
    for wrong in (3, {"image": [Placeholder(0, -1, 1)]}, {"image": [IMAGE], "audio": [IMAGE]}):
        with pytest.raises((ValueError, TypeError), match=r"^groups\[0\]\.placeholders"):
            state.build([SequenceGroup(False, [Sequence(0, 1, 8, [3, 4, 5])], placeholders=wrong)], 1)
        assert (captured.slot_mapping.tolist(), captured.seq_lens.tolist()) == before
    last = SequenceGroup(False, [Sequence(0, 1, 8, [3, 4, 5])], placeholders={"image": [Placeholder(0, 6, 3)]})
    assert state.build([last], 1).multi_modal_placeholder_index_maps["image"].dest == [0]
    assert captured.seq_lens.tolist() == [9, 1]


def test_a_rank_has_those_of_the_batch():
    """Its tokens are all of the batch's."""
    groups = [SequenceGroup(True, [Sequence(0, 12, 0, [1, 2])], placeholders={"image": [IMAGE], "audio": [SOUND]})]
    metadata = CommonMetadataBuilder(8, chunked_prefill=True).build(groups)
    mine = ContextParallel(2, 1, block_size=4).metadata(metadata)
    assert mine.multi_modal_placeholder_index_maps == metadata.multi_modal_placeholder_index_maps != {}


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize(
    ("placeholders", "error", "says"),
    [
        ([IMAGE], TypeError, "groups[1].placeholders: list found; give a list of Placeholder for each modality"),
        ("image", TypeError, "groups[1].placeholders: str found"),
        (3, TypeError, "groups[1].placeholders: int found"),
        ({3: [IMAGE]}, TypeError, "groups[1].placeholders: 3 is no name of a modality, such as 'image'"),
        ({"": [IMAGE]}, TypeError, "groups[1].placeholders: '' is no name of a modality"),
        ({"image": IMAGE}, TypeError, "groups[1].placeholders['image']: Placeholder("),
        ({"image": None}, TypeError, "groups[1].placeholders['image']: None is not a list of Placeholder"),
        ({"image": [(0, 1)]}, TypeError, "groups[1].placeholders['image'][0]: (0, 1) is not a Placeholder"),
        (
            {"image": [IMAGE, Placeholder(1, 9, 0)]}, ValueError,
            "groups[1].placeholders['image'][1].length: 0 is below 1",
        ),
        (
            {"image": [IMAGE, Placeholder(1, 7, 2)]}, ValueError,
            "groups[1].placeholders['image']: items 0 and 1 both take token 7",
        ),
        (
            {"image": [IMAGE], "audio": [SOUND, Placeholder(1, 4, 1)]}, ValueError,
            "groups[1].placeholders: image and audio both take token 4; a token takes one embedding",
        ),
    ],
    ids=lambda value: str(value)[:30],
)  # fmt: skip
def test_bad_placeholders_name_their_group(placeholders, error, says, kernels):
    groups = [
        SequenceGroup(True, [Sequence(0, 5, 0, [1, 2])]),
        SequenceGroup(True, [Sequence(0, 12, 0, [3, 4, 5])], placeholders=placeholders),
    ]
    builder = CommonMetadataBuilder(4, kernels=kernels)
    with pytest.raises(error) as caught:
        builder.build(groups)
    assert str(caught.value).startswith(says)
    assert builder.build(groups[:1]).placeholder_maps == {}


def test_maps_are_counted_before_memory_is_taken_for_them():
    one = Sequence(0, 2**20, 0, None)
    builder = CommonMetadataBuilder(16)
    builder.max_numbers = 2**20 + 8
    groups = [SequenceGroup(True, [one], placeholders={"image": [Placeholder(0, 0, 2**20)]})]
    tracemalloc.start()
    try:
        with pytest.raises(ValueError, match=r"^groups: 1048576 tokens of placeholders, with two numbers each, are"):
            builder.build(groups)
        taken = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    without = CommonMetadataBuilder(16)
    tracemalloc.start()
    try:
        without.build([SequenceGroup(True, [one])])
        assert taken < 1.1 * tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    few = [SequenceGroup(True, [one], placeholders={"image": [Placeholder(0, 7, 3)]})]
    assert builder.build(few).placeholder_maps["image"].token_indices.tolist() == [7, 8, 9]
