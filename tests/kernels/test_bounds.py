"""What a caller's objects may do while they are read: lie about their length, change, run code. Nothing is written
outside of the arrays; a wrong answer of ours would be a number that no array holds.
"""

from types import SimpleNamespace

import numpy as np
import pytest

from attncore import slots
from attncore.builder import CommonMetadataBuilder, InputBatch, MetadataBuilder, Sequence, SequenceGroup
from attncore.builder.device.arena import ArenaRing, Capacity
from attncore.kernels import load_kernels

GUARD = -77


def ints(*values):
    return np.array(values, np.int32)


def guarded(count, dtype=np.int64):
    """An array of ``count`` numbers, and the memory around it."""
    memory = np.full(count + 16, GUARD, dtype)
    return memory[8 : 8 + count], memory


def untouched(memory):
    """Whether nothing was written around the four numbers of ``guarded``."""
    return (np.delete(memory, range(8, 12)) == GUARD).all()


# ---- the functions on arrays refuse what their callers' checks did not see -------------------------------------------


@pytest.mark.parametrize(
    ("contexts", "queries", "block_size"),
    [
        (ints(0, 0), ints(2, 9), 4),  # beyond out
        (ints(0, 7), ints(2, 2), 4),  # beyond the table's columns
        (ints(0, 2**31 - 1), ints(2, 2), 4),
        (ints(0, -1), ints(2, 2), 4),
        (ints(0, 1), ints(2, -1), 4),
        (ints(0), ints(2, 2), 4),  # fewer contexts
        (ints(0, 0, 0), ints(1, 1, 1), 4),  # fewer rows of the table
        (ints(0, 0), ints(2, 2), 0),
    ],
)
def test_slots_stay_inside(kernels, contexts, queries, block_size):
    out, memory = guarded(4)
    row = load_kernels(kernels).fill_slot_mapping(np.ones((2, 2), np.int32), contexts, queries, block_size, out)
    assert row == (0 if block_size == 0 else len(queries) - 1)
    assert untouched(memory)


@pytest.mark.parametrize(
    ("contexts", "queries"), [(ints(0, 0), ints(2, 9)), (ints(0, 0), ints(2, -2)), (ints(0), ints(2, 2))]
)
def test_positions_stay_inside(kernels, contexts, queries):
    positions, memory = guarded(4)
    rows, row_memory = guarded(4, np.int32)
    assert load_kernels(kernels).fill_positions(contexts, queries, positions, rows) == 1
    for array in (memory, row_memory):
        assert untouched(array)


@pytest.mark.parametrize(
    "indptr", [ints(0, 2, 9), ints(0, 2, 5), ints(0, 2, 1), ints(0, 2, -1), ints(0, 2, -(2**31)), ints(0, 1, 2, 3)]
)
def test_pages_stay_inside(kernels, indptr):
    out, memory = guarded(4, np.int32)
    assert load_kernels(kernels).fill_page_indices(np.ones((2, 2), np.int32), indptr, out) == len(indptr) - 2
    assert untouched(memory)


def test_missing_rows_are_bad(kernels):
    assert load_kernels(kernels).fill_block_table([[1]], np.zeros((3, 2), np.int32)) == 1


# ---- arrays that are not what they say -------------------------------------------------------------------------------


class Shorter(np.ndarray):
    """An array that says it has the shape (4,)."""

    shape = property(lambda self: (4,))

    def __len__(self):
        return 4


def test_a_subclass_is_not_believed(kernels, monkeypatch):
    monkeypatch.setenv("ATTNCORE_KERNELS", kernels)
    out = np.zeros(2, np.int64).view(Shorter)
    with pytest.raises(ValueError, match=r"out: int64\[2\]"):
        slots.build_slot_mapping([[1], [2]], [0, 0], [2, 2], 4, out)
    contexts = ints(0, 0).view(Shorter)
    with pytest.raises(ValueError, match="query_lens: 4 lengths for 2 context_lens"):
        slots.build_positions(contexts, [1, 1, 1, 1])


def test_lengths_that_change_after_the_checks(kernels, monkeypatch):
    """Another thread, here the allocation of the result, writes to the caller's array."""
    monkeypatch.setenv("ATTNCORE_KERNELS", kernels)
    from attncore.kernels import host_functions

    queries = ints(1, 2)

    def late(*args):
        out = np.empty(3, np.int64)
        queries[1] = 10**6
        return out

    monkeypatch.setattr(host_functions, "output", late)
    with pytest.raises(ValueError, match="query_lens: row 1 changed while it was read"):
        slots.build_slot_mapping([[1], [2]], [0, 0], queries, 4)


@pytest.mark.parametrize("claimed", [0, 1, 50, 10**6])
def test_rows_whose_number_and_items_differ(kernels, monkeypatch, claimed):
    monkeypatch.setenv("ATTNCORE_KERNELS", kernels)

    class Rows(list):
        def __len__(self):
            return claimed

    assert slots.pad_block_table(Rows([[1, 2], [3]])).tolist() == [[1, 2], [3, 0]]


@pytest.mark.parametrize("claimed", [0, 1, 3, 10**6])
def test_ids_whose_number_and_items_differ(kernels, monkeypatch, claimed):
    monkeypatch.setenv("ATTNCORE_KERNELS", kernels)

    class Ids(list):
        def __len__(self):
            return claimed

    assert slots.pad_block_table([Ids([5, 6])]).tolist() == [[5, 6]]


# ---- items that run code ---------------------------------------------------------------------------------------------


class Shrinks:
    """A block id that empties the list that it is in."""

    def __init__(self, ids):
        self.ids = ids

    def __index__(self):
        self.ids.clear()
        return 1


def test_a_list_that_an_item_empties(kernels):
    batch = InputBatch(max_num_reqs=2, max_model_len=16, block_size=4, kernels=kernels)
    ids = [1, 2]
    ids.append(Shrinks(ids))
    try:  # what was read before it was emptied, and nothing of the list's old memory; or a refusal
        batch.add_request("a", ids)
    except ValueError as error:
        assert "changed while they were read" in str(error)  # noqa: PT017
        assert batch.num_reqs == 0
    else:
        assert set(batch.block_ids("a")) <= {1, 2}
    table = [1, 2]
    table.append(Shrinks(table))
    builder = CommonMetadataBuilder(4, kernels=kernels)
    groups = [SequenceGroup(False, [Sequence(0, 1, 2, table)])]
    assert set(builder.build(groups).host.block_table.ravel().tolist()) <= {0, 1, 2}


def test_lengths_of_an_arena_that_were_written_to(kernels):
    """A step that fails is taken back; a backend may have written to its arena, through tensors that share it."""

    class Backend:
        config = SimpleNamespace(device="cpu", block_size=4, spec=None)
        name, spec, has_plan = "writes", None, True
        from_host = staticmethod(lambda array: array)

        def plan(self, metadata):
            metadata.host._own("query_lens")[:] = [2**31 - 1, -(2**31)]
            raise RuntimeError("no plan")

    batch = InputBatch(max_num_reqs=2, max_model_len=16, block_size=4, kernels=kernels)
    batch.add_request("a", [1, 2], 3)
    batch.add_request("b", [3, 4], 3)
    builder = MetadataBuilder(batch, Backend(), max_num_batched_tokens=8)
    with pytest.raises(RuntimeError, match="no plan"):
        builder.build()
    assert all(0 <= batch.num_computed_tokens(name) <= 16 for name in "ab")


def test_page_lists_that_were_written_to(kernels):
    batch = InputBatch(max_num_reqs=2, max_model_len=16, block_size=4, kernels=kernels)
    batch.add_request("a", [1, 2], 5)
    metadata = MetadataBuilder(batch, max_num_batched_tokens=8).build()
    metadata.host._own("paged_kv_indptr")[1] = 10**6
    with pytest.raises(ValueError, match="paged_kv_indptr: row 0 was changed since the build"):
        _ = metadata.paged_kv_indices


@pytest.mark.parametrize("written", [7, 2**20, 2**31 - 1, -1, -(2**31)])
@pytest.mark.parametrize("num_requests", [0, 1, 2])
@pytest.mark.parametrize("where", [slice(None), 0, -1])
def test_page_lists_that_were_written_to_show_no_other_memory(kernels, num_requests, where, written):
    batch = InputBatch(max_num_reqs=2, max_model_len=16, block_size=4, kernels=kernels)
    for req_id in range(num_requests):
        batch.add_request(req_id, [2 * req_id, 2 * req_id + 1], 5)
    metadata = MetadataBuilder(batch, max_num_batched_tokens=8).build()
    metadata.host._own("paged_kv_indptr")[where] = written
    with pytest.raises(ValueError, match=r"^paged_kv_indptr: row \d was changed since the build"):
        _ = metadata.host.paged_kv_indices


# ---- the arenas of a step hold its shape -----------------------------------------------------------------------------

ARENA_FIELDS = [
    (False, name)
    for name in (
        "positions", "token_to_req_indices", "seq_lens", "context_lens", "query_lens", "logits_indices",
        "query_start_loc", "seq_start_loc",
        "prefill_query_start_loc", "prefill_seq_start_loc", "encoder_seq_lens", "encoder_query_lens",
        "encoder_seq_start_loc", "encoder_query_start_loc",
    )
] + [(True, name) for name in ("slot_mapping", "paged_kv_indptr", "paged_kv_last_page_len")]  # fmt: skip


def arena_arrays(num_reqs, num_tokens):
    """The arrays of an arena with a decoder group and a cross group."""
    capacity = Capacity(num_tokens, num_reqs, 0)
    views = ArenaRing(capacity, [4], True, 1).views(capacity)[0]
    return views.fields, views.groups


@pytest.mark.parametrize(
    ("padding", "message"),
    [
        ((5, 1), "num_reqs: 5 exceed the 4 that the arenas hold"),
        ((4, 3), "num_reqs: 4 of 3 tokens exceed the 8 that the arenas hold"),
        ((4, 2**30), "num_reqs: 4 of 1073741824 tokens exceed the 12 that the arenas hold"),
    ],
)
def test_a_shape_that_its_arenas_do_not_hold_is_refused(kernels, padding, message):
    module = load_kernels(kernels)
    arenas = [module.StepArena(*arena_arrays(*size), (*size[::-1], 0), True) for size in ((5, 12), (4, 8))]
    module.StepShape(arenas, [], True, 4, 2)
    with pytest.raises(ValueError, match=message):
        module.StepShape(arenas, [], True, *padding)


@pytest.mark.parametrize(("in_group", "name"), ARENA_FIELDS)
def test_an_arena_of_a_short_array_is_refused(kernels, in_group, name):
    fields, groups = arena_arrays(4, 8)
    arrays = groups[0] if in_group else fields
    arrays[name] = arrays[name][:-1]
    with pytest.raises(ValueError, match=f"^{name}: .* elements, and a step of this arena writes"):
        load_kernels(kernels).StepArena(fields, groups, (8, 4, 0), True)


def with_rows_of_any_stride(table):
    """The same table in memory whose rows are not contiguous."""
    yield np.ascontiguousarray(table[:, ::-1])[:, ::-1]
    yield np.asfortranarray(table)
    yield np.repeat(table, 2, axis=1)[:, ::2]
    yield np.broadcast_to(table[:, :1], table.shape)


def test_rows_that_are_not_contiguous_are_refused(kernels):
    """They are copied as runs of memory; a part of a wider table has contiguous rows."""
    module, table = load_kernels(kernels), np.arange(1, 9, dtype=np.int32).reshape(2, 4)
    for strange in with_rows_of_any_stride(table):
        out, memory = guarded(4, np.int32)
        with pytest.raises(ValueError, match="block_table: its rows are not contiguous"):
            module.fill_page_indices(strange, ints(0, 2, 4), out)
        assert (memory == GUARD).all()
    out, memory = guarded(4, np.int32)
    assert module.fill_page_indices(table[::-1, 1:], ints(0, 2, 4), out) == -1
    assert out.tolist() == [6, 7, 2, 3]
    assert module.fill_page_indices(np.asfortranarray(table)[:, :1], ints(0, 1, 2), out) == -1
    assert out.tolist() == [1, 5, 2, 3]
    assert untouched(memory)


def test_a_table_to_fill_has_contiguous_rows(kernels):
    reader = load_kernels(kernels).GroupReader()
    assert reader.read([SequenceGroup(False, [Sequence(0, 1, 5, [3, 4])])])
    reader.measure(4, 0, False, False, True)
    memory = np.full((4, 4), GUARD, np.int32)
    for strange in (memory[:2, :2].T, memory[:2, ::-1], memory[:2, ::2]):
        with pytest.raises(ValueError, match="block_table: its rows are not contiguous"):
            reader.fill_table(strange)
        assert (memory == GUARD).all()
    reader.fill_table(memory[1:3, 1:3])
    assert memory[1:3].tolist() == [[GUARD, 3, 4, GUARD], [GUARD, 0, 0, GUARD]]
