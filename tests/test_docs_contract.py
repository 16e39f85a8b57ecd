"""What docs/contract.md says in tables of options, caches and rows without a block table, tried."""

import dataclasses
import re
from pathlib import Path

import numpy as np
import pytest
from builder.adopted.adopted_engine import as_on_a_device
from planting import Site, site
from testing import test_unusual_caches as caches

import attncore
from attncore.builder import Sequence, SequenceGroup
from attncore.reference import ReferenceBackend
from attncore.step_arrays import FIELD_NAMES

__all__ = ["site"]
CONTRACT = (Path(__file__).parents[1] / "docs" / "contract.md").read_text()
FIELDS = {"num_heads": 2, "num_kv_heads": 2, "head_size": 8, "dtype": "float32", "block_size": 4}


def table(header):
    """The cells of each row of the table that begins with ``header``; its own header among them."""
    text = CONTRACT[CONTRACT.index(f"| {header} |") :].partition("\n\n")[0]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines()]
    return [rows[0], *rows[2:]]


def written(default):
    if default in ((), {}):
        return "empty"
    return ", ".join(f"`{one}`" for one in (default if isinstance(default, tuple) else (default,)))


def test_defaults_of_a_spec():
    _, *rows = table("field")
    told = {name.strip("`"): default for name, _, default in rows}
    for one in dataclasses.fields(attncore.BackendSpec):
        factory = one.default_factory
        default = one.default if factory is dataclasses.MISSING else factory()
        assert told[one.name] == ("required" if default is dataclasses.MISSING else written(default)), one.name


CACHES = {
    "one tensor of the shapes above": "",
    "one tensor of any other shape": caches.OWN,
    "one, whose views are not contiguous in the last dimension": caches.TRANSPOSED,
    "a pair": caches.PAIR,
    "three tensors or more": caches.THREE,
}
"""Row -> the source of the class that tests/testing/test_unusual_caches.py runs the kit on."""


def test_what_a_class_with_a_cache_of_its_own_overrides():
    (_, *methods), *rows = table("its whole cache")
    assert [row[0] for row in rows] == [*CACHES]
    for what, *cells in rows:
        defined = set(re.findall(r"def (\w+)", CACHES[what]))
        told = {method.strip("`") for method, cell in zip(methods, cells, strict=True) if cell != "no"}
        assert told == defined & {method.strip("`") for method in methods}, what


def test_views_of_a_pair_are_given_without_the_declaration():
    torch = pytest.importorskip("torch")
    spec = attncore.BackendSpec(
        name="acme", api=1, factory="a:B", devices={"any": 1}, dtypes={"float32"}, head_sizes={8}, block_sizes={4}
    )  # fmt: skip
    config = attncore.BackendConfig(2, 2, 8, "float32", 4, spec=spec)
    pair = torch.zeros(3, 4, 2, 8), torch.zeros(3, 2, 4, 8).transpose(1, 2)
    views = ReferenceBackend(config).kv_cache_views(pair)
    assert [view.data_ptr() for view in views] == [part.data_ptr() for part in pair]


LIGHT = """
from attncore import BackendSpec, Option, hookimpl

SEEN = []

def check(request, host):
    SEEN.append(dict(request.options.get("acme", {})))
    return ()

@hookimpl
def attncore_backend():
    return BackendSpec(
        name="acme", api=1, factory="attn_acme_heavy:Backend", devices={"any": 5}, dtypes={"float32"}, head_sizes={8},
        block_sizes={4}, check=check, options={
            "splits": Option(int, "1 to 64", default=8), "kernel": Option(str, "which", choices=("a", "b")),
        },
    )
"""
HEAVY = """
from attncore import BackendConfig
from attncore.reference import ReferenceBackend

class Backend(ReferenceBackend):
    def __init__(self, config):
        super().__init__(config)
        if not 1 <= config.options.get("splits", 8) <= 64:
            raise ValueError(f"options: splits {config.options['splits']} is not between 1 and 64")
"""


def test_who_sees_which_options(site: Site):
    site.plugin("acme", LIGHT, heavy=HEAVY)
    request = {**FIELDS, "backend": "acme"}
    choice = attncore.select(**request)
    import attn_acme

    assert attn_acme.SEEN == [{}]  # no defaults
    assert dict(choice.create().config.options) == {"splits": 8, "kernel": None}
    attncore.select(**request, options={"acme": {"splits": 99}})  # a range is for its check
    with pytest.raises(attncore.NoBackendError, match=r"'kernel': 'c' is not one of 'a', 'b'"):
        attncore.select(**request, options={"acme": {"splits": 4, "kernel": "c"}})
    assert attn_acme.SEEN[1:] == [{"splits": 99}, {"splits": 4}]
    with pytest.raises(ValueError, match=r"^options: splits 0 is not between 1 and 64"):
        choice.create(options={"splits": 0})
    assert len(attn_acme.SEEN) == 3  # not asked by create
    bad = dataclasses.replace(choice.config(), options={"kernel": "c"})
    for options in ({"kernel": "c"}, {"split": 1}):
        with pytest.raises(ValueError, match=r"^options: "):
            ReferenceBackend(dataclasses.replace(bad, options=options))


def test_writing_none_is_an_error_but_where_there_is_nothing_to_write():
    torch = pytest.importorskip("torch")
    backend = ReferenceBackend(attncore.BackendConfig(**FIELDS))
    layer, cache = backend.impl("layers.0", scale=1.0), backend.allocate_kv_cache(4)
    builder = persistent(backend)
    builder.batch.add_request("a", [1])
    metadata = builder.build({"a": 2})
    rows = torch.ones(2, 2, 8)
    for name, given in (("key", (None, None)), ("key", (None, rows)), ("value", (rows, None))):
        with pytest.raises(ValueError, match=rf"^{name}: None found for 2 tokens to write"):
            layer.write_cache(*given, cache, metadata)
    layer.write_cache(None, None, None, metadata)
    builder.batch.remove_request("a")
    layer.write_cache(None, None, cache, builder.build({}))
    assert not cache.any()


def persistent(backend):
    batch = attncore.InputBatch(max_num_reqs=2, max_model_len=16, block_size=4)
    return attncore.MetadataBuilder(batch, backend, max_num_batched_tokens=8)


@pytest.fixture(params=[0, 1])
def paged(request):
    """A backend that reads page lists, with each ``pad_seq_len``."""
    spec = attncore.BackendSpec(
        name="acme", api=1, factory="a:B", devices={"any": 1}, dtypes={"float32"}, head_sizes={8}, block_sizes={4},
        host_needs=HOST, host_lengths="exact", cuda_graph="always", pad_seq_len=request.param,
        device_needs={"paged_kv_indptr", "paged_kv_last_page_len", "paged_kv_indices"},
    )  # fmt: skip
    return ReferenceBackend(attncore.BackendConfig(**FIELDS, spec=spec))


HOST = {"query_start_loc", "query_lens", "context_lens", "seq_lens", "slot_mapping", "positions", "block_table"} | {
    "paged_kv_indptr",
    "paged_kv_last_page_len",
}


def rows_of(metadata):
    return {name: np.asarray(getattr(metadata.host, name)).tolist() for name in HOST}


def test_fields_of_rows_without_a_block_table(paged):
    """The rows of the table, in its order, with what steps hold."""
    _, *rows = table("array")
    assert {row[0].strip("`") for row in rows} == HOST
    told = {name.strip("`"): dict(zip(("padded", "profile", "prompt"), cells, strict=True)) for name, *cells in rows}
    pad = paged.spec.pad_seq_len

    builder = persistent(paged)
    builder.capture(2)
    builder.batch.add_request("a", [1, 2])
    builder.build({"a": 5})
    step = builder.build({"a": 1}, bucket=2)
    assert (step.num_reqs, step.num_actual_reqs, step.num_tokens) == (2, 1, 2)
    found = rows_of(step)
    assert found["query_start_loc"] == [0, 1, 1]
    assert found["seq_lens"] == [6, pad]
    for name in ("query_lens", "context_lens", "positions", "paged_kv_last_page_len"):
        assert found[name][1] == 0
        assert told[name]["padded"].startswith("0")
    assert found["slot_mapping"][1] == int(told["slot_mapping"]["padded"]) == -1
    assert set(found["block_table"][1]) == {int(told["block_table"]["padded"])} == {0}
    assert found["paged_kv_indptr"] == [0, 2, 2]

    found = rows_of(builder.build_profile([3, 1]))
    assert (found["query_start_loc"], found["query_lens"], found["seq_lens"]) == ([0, 3, 4], [3, 1], [3, 1])
    assert (found["context_lens"], found["slot_mapping"], found["positions"]) == ([0, 0], [-1] * 4, [0, 1, 2, 0])
    assert found["block_table"] == [[], []]
    assert (found["paged_kv_indptr"], found["paged_kv_last_page_len"]) == ([0, 0, 0], [0, 0])

    lists = attncore.CommonMetadataBuilder(4, "flashinfer", max_seq_len_to_capture=16)
    prompt = SequenceGroup(True, [Sequence(0, 3, 0, [3])])
    decode = SequenceGroup(False, [Sequence(1, 1, 5, [1, 2])])
    step = lists.build([prompt])
    found = rows_of(step)
    assert step.from_groups
    assert (found["seq_lens"], found["context_lens"], found["slot_mapping"]) == ([3], [0], [12, 13, 14])
    assert (found["block_table"], found["paged_kv_indptr"], found["paged_kv_last_page_len"]) == ([[]], [0, 1], [3])
    assert rows_of(lists.build([prompt, decode]))["block_table"] == [[0, 0], [1, 2]]

    found = rows_of(lists.build([decode], 1))
    assert (found["query_start_loc"], found["query_lens"], found["context_lens"]) == ([0, 1], [1], [5])
    assert (found["seq_lens"], found["slot_mapping"], found["positions"]) == ([6, 1], [9, -1], [5, 0])
    assert not any(found["block_table"][1])
    assert (found["paged_kv_indptr"], found["paged_kv_last_page_len"]) == ([0, 2, 2], [2, 0])


@pytest.mark.parametrize("feature", ["kv_scales_on_device", "kv_scales_per_head"])
def test_a_feature_of_scales_is_declared_with_those_before_it(feature):
    assert "a spec that declares it declares those too: else it is an error" in " ".join(CONTRACT.split())
    with pytest.raises(ValueError, match=rf"'{feature}' is declared without '"):
        attncore.BackendSpec(
            name="acme", api=1, factory="a:B", devices={"any": 1}, dtypes={"float32"}, head_sizes={8}, block_sizes={4},
            kv_cache_dtypes={"fp8_e4m3"}, features={feature},
        )  # fmt: skip


def test_what_of_a_layer_is_in_its_plan_key():
    """Layers that differ in the rest alone share a key."""
    text = CONTRACT[CONTRACT.index("A layer's plan key is a `PlanKey`") :].partition("\n\n")[0]
    told = " ".join(text.split()).split("and nothing else")
    inside, outside = (set(re.findall(r"`(\w+)`", part)) for part in told)
    assert inside - {"PlanKey"} == set(attncore.PlanKey._fields)
    layer = {"scale": 1.0, "sliding_window": None, "logits_soft_cap": None, "attn_type": "decoder"}
    others = {"scale": 0.5, "sliding_window": 3, "logits_soft_cap": 2.0, "attn_type": "encoder_only"}
    backend = ReferenceBackend(attncore.BackendConfig(**FIELDS))
    for name, value in others.items():
        backend.forget_layers()
        for number, given in enumerate((layer, layer | {name: value})):
            backend.impl(f"layers.{number}", **given)
        assert len(backend.plan_keys) == 2, name
    backend.forget_layers()
    for number, given in enumerate(({}, {"alibi_slopes": [0.5] * 2}, {"sinks": [0.5] * 2})):
        backend.impl(f"layers.{number}", **layer, **given)
        assert given.keys() <= outside
    assert len(backend.plan_keys) == 1


class Shapes(ReferenceBackend):
    """Notes in ``plan`` what the host knows of tensors on the device."""

    def plan(self, metadata):
        self.seen = {name: described(metadata, name) for name in ("block_table", "seq_lens", "slot_mapping")}


def described(metadata, name):
    tensor = getattr(metadata, name)
    return tensor.shape, tensor.dtype, tensor.stride(), tensor.data_ptr()


@pytest.mark.parametrize("transport", ["auto", "copy"])
def test_a_plan_reads_shapes_and_addresses_of_tensors_on_the_device(transport):
    backend = Shapes(attncore.BackendConfig(**FIELDS))
    batch = attncore.InputBatch(max_num_reqs=2, max_model_len=16, block_size=4)
    builder = attncore.MetadataBuilder(batch, backend, max_num_batched_tokens=8, transport=transport)
    for name in "ab":
        batch.add_request(name, [1, 2, 3], num_computed_tokens=5)
    for scheduled in ({}, {"a": 3}):
        step = builder.build(scheduled)
        assert backend.seen == {name: described(step, name) for name in backend.seen}


def test_the_shape_of_a_cache_is_that_of_the_whole_one():
    backend = ReferenceBackend(attncore.BackendConfig(**FIELDS))
    whole = backend.allocate_kv_cache(3)
    assert tuple(whole.shape) == tuple(backend.kv_cache_shape(3, 4, 2, 8))
    assert sum(view.numel() for view in backend.kv_cache_views(whole)) == whole.numel()


def test_the_words_of_what_a_backend_reads():
    """Every word of the table is one of ``host_needs`` and ``device_needs``, and no other is; lengths are stated."""
    _, *rows = table("word")
    told = {word.strip("`"): cells for word, *cells in rows}
    assert told.keys() == FIELD_NAMES
    facts = {"name": "acme", "api": 1, "factory": "a:B", "devices": {"any": 1}, "dtypes": {"float32"}}
    facts |= {"head_sizes": {8}, "block_sizes": {4}}
    for word, (says, lengths, _, read) in told.items():
        assert says
        assert re.match(r"(host|device|host and device): ", read)
        attncore.BackendSpec(**facts, host_needs={word}, device_needs={word}, host_lengths="bounded")
        if lengths:
            with pytest.raises(ValueError, match=f"host_needs names {word}"):
                attncore.BackendSpec(**facts, host_needs={word})
        else:
            attncore.BackendSpec(**facts, host_needs={word})
    with pytest.raises(ValueError, match="host_needs: 'num_reqs' is no field of metadata"):
        attncore.BackendSpec(**facts, host_needs={"num_reqs"})


def test_which_of_them_an_adopted_step_has_on_the_host_of_a_device():
    torch = pytest.importorskip("torch")
    _, *rows = table("word")
    steps = attncore.AdoptedSteps(
        ReferenceBackend(attncore.BackendConfig(**FIELDS)), max_num_reqs=2, max_num_tokens=8, max_model_len=16,
        num_blocks=8,
    )  # fmt: skip
    as_on_a_device(steps)
    starts, lens = (torch.tensor(numbers, dtype=torch.int32) for numbers in ([0, 1], [5]))
    step = steps.build(
        query_start_loc=starts, seq_lens=lens, block_table=torch.ones((1, 4), dtype=torch.int32),
        slot_mapping=torch.tensor([5]), host_query_start_loc=np.array([0, 1], np.int32),
        host_seq_lens=np.array([5], np.int32),
    )  # fmt: skip
    told = {word.strip("`"): cells[2] == "yes" for word, *cells in rows}
    assert told == {word: hasattr(step.host, word) for word in told}


class Numbers(ReferenceBackend):
    """Notes of each step that it plans its object, its number and what was kept there; keeps something there."""

    def __init__(self):
        super().__init__(attncore.BackendConfig(**FIELDS))
        self.seen = []

    def plan(self, metadata):
        self.seen.append((metadata, metadata.step, dict(metadata.kept)))
        metadata.kept["plan"] = metadata.step


def test_numbers_of_steps_and_what_is_kept_with_the_persistent_builder():
    """The first row of the table of lifetimes; tests/builder/adopted/test_adopted_captures.py has the second."""
    backend = Numbers()
    batch = attncore.InputBatch(max_num_reqs=2, max_model_len=16, block_size=4)
    builder = attncore.MetadataBuilder(batch, backend, max_num_batched_tokens=8, depth=2)
    batch.add_request("a", [1, 2])
    for _ in range(4):
        builder.build({"a": 1})
    builder.capture(1)
    assert [(number, kept) for _, number, kept in backend.seen] == [(number, {}) for number in range(5)]
    objects = [metadata for metadata, _, _ in backend.seen]
    assert objects[0] is objects[2] is not objects[1] is objects[3]
    profile = builder.build_profile([2])
    assert (profile.step, builder.last_step) == (0, 4)
    view = builder.build({"a": 3}).prefill_metadata
    assert (view.step, view.kept) == (0, {})


def test_numbers_of_steps_and_what_is_kept_with_the_list_builder():
    """The last two rows of the table of lifetimes."""
    backend = Numbers()
    builder = attncore.CommonMetadataBuilder(4, max_seq_len_to_capture=16, backend=backend)
    state = backend.get_state_cls()(backend, builder)
    with state.graph_capture(1):
        captured = state.metadata_for_capture(1)
    decode = [SequenceGroup(False, [Sequence(0, 1, 5, [1, 2])])]
    step, later = builder.build(decode), builder.build(decode, state.pad_size(1))
    assert later is not step
    step.advance_step()
    assert [(number, kept) for _, number, kept in backend.seen] == [(number, {}) for number in range(4)]
    assert step.kept == {"plan": step.step} == {"plan": 3}
    assert state.prepare(later) is captured
    assert (captured.step, captured.kept, later.kept) == (2, {"plan": 2}, {"plan": 2})
