"""The list builder and the names for porting, against what the first generation's own code answered (record_v0.py)."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from builder.lists.decodes import fields, plain
from builder.plain_backend import Least

from attncore import AttentionBackend, AttentionType, BackendConfig, slots
from attncore.builder import (
    CommonAttentionMetadata,
    CommonMetadataBuilder,
    Sequence,
    SequenceGroup,
    get_seq_len_block_table_args,
    is_all_cross_attn_metadata_set,
    is_all_encoder_attn_metadata_set,
    token_counts,
)
from attncore.builder.lists.capture_state import CommonAttentionState
from attncore.reference import ReferenceBackend

V0 = json.loads((Path(__file__).parent / "v0_answers.json").read_text())
SETTINGS = {"window": "sliding_window", "chunked": "chunked_prefill", "capture": "max_seq_len_to_capture"}
OURS = {"cross_block_tables": "cross_block_table"}
NAMES = (
    "num_prefills", "num_prefill_tokens", "num_decode_tokens", "slot_mapping", "seq_lens_tensor", "max_query_len",
    "max_prefill_seq_len", "max_decode_seq_len", "max_decode_query_len", "decode_query_len", "context_lens_tensor",
    "query_start_loc", "seq_start_loc", "use_cuda_graph", "is_profile_run", "block_tables", "paged_kv_indptr",
    "paged_kv_last_page_len",
)  # fmt: skip


def backend(name="auto"):
    return ReferenceBackend(BackendConfig(4, 2, 8, "float32", 4))


def groups_of(case, kind=list):
    numbers = iter(range(100))
    return [
        SequenceGroup(is_prompt, [Sequence(next(numbers), q, c, t if t is None else kind(t)) for q, c, t in rows], hit)
        for is_prompt, hit, rows in case["groups"]
    ]


def built(case, kernels=None, kind=list, **options):
    settings = {SETTINGS[name]: value for name, value in case["settings"].items() if name != "pad"}
    builder = CommonMetadataBuilder(4, case["layout"], kernels=kernels, **settings, **options)
    return builder.build(groups_of(case, kind), case["settings"].get("pad", -1))


def named(cases):
    return pytest.mark.parametrize("case", cases, ids=[f"{case['name']}, {case['layout']}" for case in cases])


def expected(case):
    """The recorded fields, less what is known to be wrong or missing in them (docs/port-from-v0.md lists it)."""
    theirs = dict(case["fields"])
    hit = any(hit for _, hit, _ in case["groups"])
    if case["layout"] == "flashinfer":
        if theirs["is_profile_run"]:  # no entry for a profiled row
            rows = len(theirs["seq_lens_tensor"])
            theirs |= {"paged_kv_indptr": [0] * (rows + 1), "paged_kv_last_page_len": [0] * rows}
        if hit:  # the cached blocks alone: too narrow for the row's own tokens
            del theirs["block_tables"]
        if "window" in case["settings"]:  # kernels that read page lists are given the whole table beside
            del theirs["block_tables"]
    return theirs


@named(V0["steps"])
@pytest.mark.parametrize("kind", [list, lambda table: np.array(table, np.int32)], ids=["lists", "arrays"])
def test_steps_have_the_numbers_of_the_original(kernels, case, kind):
    metadata, theirs = built(case, kernels, kind), expected(case)
    for name in NAMES:
        if name in theirs:
            assert plain(getattr(metadata, name)) == theirs[name], name
    if "seq_lens" in theirs:
        assert metadata.host.seq_lens.tolist() == theirs["seq_lens"]
    if "paged_kv_indices" in theirs:  # with zeros behind them there
        count = metadata.host.paged_kv_indptr[-1]
        assert metadata.host.paged_kv_indices.tolist() == theirs["paged_kv_indices"][:count]


@named(V0["steps"])
@pytest.mark.parametrize("on_torch", [False, True])
def test_make_metadata_takes_the_originals_arguments(case, on_torch):
    """Every field, those that the original does not have included, is that of a build of the step."""
    given = dict(case["fields"])
    if on_torch:
        kinds = {"slot_mapping": torch.int64}
        lists = {name: value for name, value in given.items() if isinstance(value, list) and name != "seq_lens"}
        given |= {name: torch.tensor(value, dtype=kinds.get(name, torch.int32)) for name, value in lists.items()}
    else:
        given["block_tables"] = np.array(given["block_tables"], np.int32)
    one = backend()
    metadata, step = one.make_metadata(**given), built(case, backend=one)
    assert type(metadata) is one.get_metadata_cls()
    assert metadata.slot_mapping.dtype == torch.int64
    found, wanted = fields(metadata), fields(step)
    if "block_tables" not in expected(case):
        del found["block_table"], wanted["block_table"]
    assert found == wanted
    assert metadata.is_profile_run == step.is_profile_run
    for view in ("prefill_metadata", "decode_metadata"):
        mine, theirs = getattr(metadata, view), getattr(step, view)
        assert (mine is None) == (theirs is None)
        assert mine is None or type(mine) is one.get_metadata_cls()


def test_make_metadata_of_what_a_graph_is_captured_over():
    theirs = V0["graphs"]["captured"]
    metadata = backend().make_metadata(**theirs | {"query_start_loc": None, "seq_lens": None})
    assert metadata.query_start_loc.tolist() == [0, 1, 2]
    assert (metadata.num_decodes, metadata.max_seq_len, metadata.use_cuda_graph) == (2, 16, True)
    assert metadata.slot_mapping.tolist() == theirs["slot_mapping"]


STEP = {
    "num_prefills": 1, "num_prefill_tokens": 3, "num_decode_tokens": 1, "slot_mapping": [4, 5, 6, 9],
    "seq_lens": [3, 6], "query_start_loc": [0, 3, 4], "block_tables": np.array([[1, 0], [3, 2]]),
}  # fmt: skip
WRONG = {
    "slot_mapping: missing": {"slot_mapping": None},
    "num_prefills: missing": {"num_prefills": None},
    "seq_lens_tensor: missing; give it, or seq_lens": {"seq_lens": None},
    "query_start_loc: missing; it says": {"query_start_loc": None},
    "slot_maping: no field of a step; did you mean slot_mapping": {"slot_maping": []},
    r"seq_lens: .3, 6. found, but seq_lens_tensor has .3, 7.": {"seq_lens_tensor": [3, 7]},
    r"query_start_loc: .0, 4, 3. found; starts begin": {"query_start_loc": [0, 4, 3]},
    r"query_start_loc: .1, 3, 4. found; starts begin": {"query_start_loc": [1, 3, 4]},
    "query_start_loc: 4 starts found; 2 rows must have 3": {"query_start_loc": [0, 1, 3, 4]},
    "query_start_loc: 2 starts found; 2 rows must have 3": {"query_start_loc": [0, 4]},
    "query_start_loc: it ends with 5": {"query_start_loc": [0, 3, 5]},
    "num_prefills: 3 found, but there are 2 rows": {"num_prefills": 3},
    "num_decode_tokens: -1": {"num_decode_tokens": -1},
    "context_lens_tensor: 3 lengths": {"context_lens_tensor": [0, 1, 2]},
    r"fields\['slot_mapping'\]: 3 long": {"slot_mapping": [4, 5, 6]},
    "encoder_seq_lens: 1 length for 2 requests": {"encoder_seq_lens": [4]},
    r"num_prefill_tokens: 3 found, but query_start_loc\[num_prefills 0\] is 0": {"num_prefills": 0},
    r"num_prefill_tokens: 2 found, but query_start_loc\[num_prefills 1\] is 3": {
        "num_prefill_tokens": 2,
        "num_decode_tokens": 2,
    },
    r"num_prefill_tokens: 3 found, but query_start_loc\[num_prefills 2\] is": {"num_prefills": 2},
    "context_lens_tensor: row 0 ends after 4 tokens": {"context_lens_tensor": [1, 5]},
    "context_lens_tensor: row 1 ends after 5 tokens": {"context_lens_tensor": [0, 4]},
    "context_lens_tensor: row 1 ends after 9 tokens": {"context_lens_tensor": [0, 8], "window_left": -1},
    r"context_lens_tensor: .S2": {"context_lens_tensor": b"05"},
    "seq_lens, less the tokens of this step: -1 at index 0": {"seq_lens": [2, 6]},
    r"seq_start_loc: .0, 3, 8. found; the lengths add up to .0, 3, 9.": {"seq_start_loc": [0, 3, 8]},
    r"encoder_seq_start_loc: .0, 4, 8. found": {"encoder_seq_lens": [4, 5], "encoder_seq_start_loc": [0, 4, 8]},
    "max_query_len: 2 found, but there is a row of 3": {"max_query_len": 2},
    "max_prefill_seq_len: 2 found": {"max_prefill_seq_len": 2},
    "max_decode_seq_len: 5 found": {"max_decode_seq_len": 5},
    "max_decode_query_len: 0 found": {"max_decode_query_len": 0},
    "decode_query_len: 0 found": {"decode_query_len": 0},
    "max_encoder_seq_len: 4 found": {"encoder_seq_lens": [4, 5], "max_encoder_seq_len": 4},
    "use_cuda_graph: 'no' is not True or False": {"use_cuda_graph": "no"},
    "is_profile_run: 1 is not True or False": {"is_profile_run": 1},
}
PAGED = STEP | {
    "page_size": 4, "paged_kv_indptr": [0, 1, 3], "paged_kv_indices": [1, 3, 2, 0], "paged_kv_last_page_len": [3, 2],
}  # fmt: skip
WRONG_PAGES = {
    "paged_kv_indptr: missing": {"paged_kv_indptr": None},
    "paged_kv_indices: missing": {"paged_kv_indices": None},
    "paged_kv_last_page_len: missing": {"paged_kv_last_page_len": None},
    "paged_kv_last_page_len: an array with masked values": {
        "paged_kv_last_page_len": np.ma.masked_array([3, 2], [False, True])
    },
    "paged_kv_indices: an array with masked values": {
        "paged_kv_indices": np.ma.masked_array([1, 3, 2], [False, True, False])
    },
    r"paged_kv_indptr: .S3": {"paged_kv_indptr": b"013"},
    r"paged_kv_indptr: int64\[\]": {"paged_kv_indptr": 3},
    "paged_kv_indptr: <U": {"paged_kv_indptr": "013"},
    "paged_kv_indices: -1 at index 1": {"paged_kv_indices": [1, -1, 2]},
    "paged_kv_indices: float64": {"paged_kv_indices": [1.0, 3.0, 2.0]},
    "paged_kv_indices: 2 pages found, but paged_kv_indptr ends with 3": {"paged_kv_indices": [1, 3]},
    r"paged_kv_indptr: .0, 3. found; 2 rows must have 3 starts": {"paged_kv_indptr": [0, 3]},
    r"paged_kv_indptr: .0, 3, 1. found": {"paged_kv_indptr": [0, 3, 1]},
    "paged_kv_last_page_len: 1 length for 2 requests": {"paged_kv_last_page_len": [3]},
    "paged_kv_indptr: row 0 ends after 4 tokens, 3 of them of this step": {"paged_kv_last_page_len": [4, 2]},
    "paged_kv_indptr: row 1 ends after 7 tokens": {"paged_kv_last_page_len": [3, 3], "window_left": -1},
    "page_size: 0 is below 1": {"page_size": 0},
}


@pytest.mark.parametrize("message", WRONG)
def test_make_metadata_refuses_what_is_no_step(message):
    one = backend()
    assert one.make_metadata(**STEP).positions.tolist() == [0, 1, 2, 5]
    with pytest.raises((TypeError, ValueError), match=f"^{message}"):
        one.make_metadata(**STEP | WRONG[message])


@pytest.mark.parametrize("message", WRONG_PAGES)
def test_make_metadata_refuses_page_lists_that_fit_no_step(message):
    one = backend()
    assert one.make_metadata(**PAGED).positions.tolist() == [0, 1, 2, 5]
    with pytest.raises((TypeError, ValueError), match=f"^{message}"):
        one.make_metadata(**PAGED | WRONG_PAGES[message])


def test_make_metadata_with_an_encoder():
    encoder = {"encoder_seq_lens": [5, 2], "cross_slot_mapping": [8, 9, 10, 11, 12],
               "cross_block_tables": [[0], [7]]}  # fmt: skip
    metadata = backend().make_metadata(**STEP | encoder)
    groups = [SequenceGroup(True, [Sequence(0, 3, 0, [1])], False, 5, [2, 3]),
              SequenceGroup(False, [Sequence(1, 1, 5, [3, 2])], False, 2, [7])]  # fmt: skip
    step = CommonMetadataBuilder(4, encoder_decoder=True).build(groups)
    names = [name for name in fields(step) if "encoder" in name or "cross" in name]
    assert {name: fields(metadata)[name] for name in names} == {name: fields(step)[name] for name in names}


# ---- steps that advance


@pytest.mark.parametrize("case", V0["advanced"], ids=["common", "flash", "padded", "prompts turn into decodes"])
@pytest.mark.parametrize("on_torch", [False, True])
def test_steps_advance_as_in_the_original(kernels, case, on_torch):
    metadata = built(case, kernels, backend=backend() if on_torch else None)
    num_queries = len(metadata.host.query_lens)
    tokens = np.zeros(num_queries + max(case["settings"].get("pad", 0), 0), np.int64)
    for step, theirs in enumerate(case["after"]):
        sampled = np.arange(num_queries) + 10 * (step + 1)
        metadata.advance_step(tokens, sampled, num_queries, case["turns"] and not step)
        assert tokens.tolist() == theirs["input_tokens"]
        assert plain(metadata.positions) == theirs["input_positions"]
        names = theirs.keys() - {"input_tokens", "input_positions"}
        assert {name: plain(getattr(metadata, name)) for name in names} == {name: theirs[name] for name in names}


def test_slots_are_those_of_the_original(kernels, monkeypatch):
    monkeypatch.setenv("ATTNCORE_KERNELS", kernels)
    for answer in V0["slots"]:
        profiled, seq_len, context_len, start_idx, block_size, table = answer["asked"]
        for kind in (list, np.array):
            found = []
            tables = {7: None if table is None else kind(table)}
            slots.compute_slot_mapping(profiled, found, 7, seq_len, context_len, start_idx, block_size, tables)
            assert found == answer["slots"]


# ---- encoders


def encoder_step():
    groups = [SequenceGroup(False, [Sequence(i, 1, 5, [3, 4])], False, length, [7, 8])
              for i, length in enumerate([6, 2, 5])]  # fmt: skip
    return CommonMetadataBuilder(4, "flash", encoder_decoder=True).build(groups)


def test_attention_reads_what_it_reads_in_the_original():
    metadata = encoder_step()
    for asked, names in V0["encoder"]["read"].items():
        attn_type, _, is_prompt = asked.partition(" ")
        found = get_seq_len_block_table_args(metadata, is_prompt == "True", attn_type)
        for value, name in zip(found, names, strict=True):
            assert value is None if name is None else plain(value) == plain(getattr(metadata, name)), (asked, name)
    for attn_type, counts in V0["encoder"]["tokens"].items():
        assert list(token_counts(metadata, attn_type)) == counts


def test_what_is_set_is_said_as_in_the_original():
    steps = {"cross": encoder_step(), "no encoder": built(V0["steps"][0])}
    steps["encoder"] = backend().make_metadata(**STEP | {"encoder_seq_lens": [5, 2]})
    for name, answer in V0["encoder"]["set"].items():
        step = steps[name]
        assert [step.is_all_encoder_attn_metadata_set, step.is_all_cross_attn_metadata_set] == answer, name
        assert [is_all_encoder_attn_metadata_set(step), is_all_cross_attn_metadata_set(step)] == answer, name
    assert plain(steps["cross"].encoder_seq_lens_tensor) == [6, 2, 5]
    with pytest.raises(ValueError, match="metadata: attention of type encoder_decoder needs encoder_seq_lens, cross"):
        get_seq_len_block_table_args(steps["encoder"], True, AttentionType.ENCODER_DECODER)
    with pytest.raises(ValueError, match="attn_type: encoder_only found"):
        get_seq_len_block_table_args(steps["cross"], True, "encoder_only")
    with pytest.raises(ValueError, match="attn_type: 'both' is not one of"):
        get_seq_len_block_table_args(steps["cross"], True, "both")


# ---- graphs, caches, classes


def test_graphs_read_the_buffers_of_the_original():
    for encoder, names in V0["graphs"]["input_buffers"].items():
        is_encoder = encoder == "True"
        for device in (None, backend()):
            builder = CommonMetadataBuilder(
                4, "flash", max_seq_len_to_capture=16, encoder_decoder=is_encoder, backend=device
            )
            state = CommonAttentionState(device, builder)
            with state.graph_capture(2):
                captured = state.graph_capture_get_metadata_for_batch(2, is_encoder)
            buffers = state.get_graph_input_buffers(captured, is_encoder)
            assert sorted(buffers) == sorted(names)
            if is_encoder:
                assert buffers["cross_slot_mapping"].shape == (0,)
                assert "cross_slot_mapping" in state.graph_input_buffers(captured)
                state.prepare_graph_input_buffers(buffers, captured, True)


class WithHeadsFirst(Least):
    def kv_cache_shape(self, num_blocks, block_size, num_kv_heads, head_size):
        inner = (block_size, num_kv_heads) if self.config.kv_cache_layout == "NHD" else (num_kv_heads, block_size)
        return (2, num_blocks, *inner, head_size)


@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_a_cache_allocated_by_the_originals_recipe_is_ours(layout):
    """A shape, permuted by the order of strides for the allocation and back for the view."""
    one = WithHeadsFirst(BackendConfig(4, 2, 8, "float32", 4, kv_cache_layout=layout))
    shape, order = one.get_kv_cache_shape(9, 4, 2, 8), one.get_kv_cache_stride_order()
    cache = torch.zeros([shape[axis] for axis in order]).permute(*(order.index(axis) for axis in range(len(order))))
    allocated = one.allocate_kv_cache(9)
    assert (cache.shape, cache.stride()) == (allocated.shape, allocated.stride())
    theirs, their_order = V0["kv_cache"][layout]
    memory = [theirs[axis] for axis in their_order]  # blocks before keys and values; ours the other way round
    assert memory[2:] == list(shape[2:])
    one.kv_cache_views(cache)


def test_each_backend_has_classes_of_its_own():
    class Flash(ReferenceBackend):
        list_layout = "flash"

    class Metadata(CommonAttentionMetadata):
        pass

    class Builder(CommonMetadataBuilder):
        pass

    class Given(ReferenceBackend):
        metadata_class, builder_class = Metadata, Builder

    for kind in (Flash, Given, ReferenceBackend):
        assert issubclass(kind.get_metadata_cls(), CommonAttentionMetadata)
        assert issubclass(kind.get_builder_cls(), CommonMetadataBuilder)
        assert kind.get_metadata_cls() is kind.get_metadata_cls()
        assert kind.get_builder_cls() is kind.get_builder_cls()
    assert len({kind.get_metadata_cls() for kind in (Flash, Given, ReferenceBackend)}) == 3
    assert len({kind.get_builder_cls() for kind in (Flash, Given, ReferenceBackend)}) == 3
    assert (Given.get_metadata_cls(), Given.get_builder_cls()) == (Metadata, Builder)
    builder = Flash.get_builder_cls()(4)
    assert type(builder).__name__ == "FlashMetadataBuilder"
    step = builder.build([SequenceGroup(False, [Sequence(0, 2, 3, [5, 6])])])  # of several tokens: layout flash
    assert type(step) is Flash.get_metadata_cls()
    assert type(step.decode_metadata) is Flash.get_metadata_cls()
    assert type(ReferenceBackend.get_builder_cls()(4, "flash").build(groups_of(V0["steps"][0]))) is (
        ReferenceBackend.get_metadata_cls()
    )
    assert AttentionBackend.list_layout == "common"
