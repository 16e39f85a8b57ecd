"""Which fields a step is sent with: what backends declare, what engines read, and what was asked for."""

import random

import numpy as np
import pytest
from builder.device.arena_batches import CONFIG, Backend, two_requests
from builder.device.test_arena import LateTransport
from builder.plain_backend import config
from late_verdicts import GROUPS, drafts_judged_late

from attncore import ATTNCORE_API, BackendSpec, InputBatch, KVCacheGroup, MetadataBuilder, MultipleOf
from attncore.builder.fields import FIELDS
from attncore.builder.persistent import assembly
from attncore.builder.persistent.sent_fields import OF_ENGINES

ASKED = (
    "token_to_req_indices", "seq_lens", "context_lens", "query_lens", "query_start_loc", "seq_start_loc",
    "paged_kv_indptr", "paged_kv_last_page_len", "paged_kv_num_pages",
)  # fmt: skip
INTERNAL = {"prefill_query_start_loc", "prefill_seq_start_loc"}


def backend(*needs, **more):
    spec = BackendSpec(
        name="late", api=ATTNCORE_API, factory="nowhere:Backend", devices={"any": 1}, dtypes={"float32"},
        head_sizes={8}, block_sizes=MultipleOf(1), device_needs=needs, cuda_graph="always", **more,
    )  # fmt: skip
    return Backend(config(spec))


class Device(LateTransport):
    """Its memory is the device's alone: what was not sent is no number of the step."""

    def attach(self, ring):
        super().attach(ring)
        self._arena.fill_(0x5A)
        self.copied = []

    def _copy(self, arena, start, stop):
        super()._copy(arena, start, stop)
        self.copied.append((start, stop))


@pytest.fixture
def sides(monkeypatch):
    """The transports of the builders that a test makes."""
    made = []

    def new(transport, device, tables, page_lists):
        made.append(Device(device, tables, page_lists))
        return made[-1]

    monkeypatch.setattr(assembly, "new_transport", new)
    return made


def builder_of(given, kernels=None, batch=None, **settings):
    batch = two_requests(kernels) if batch is None else batch
    return MetadataBuilder(batch, given, max_num_batched_tokens=32, transport="copy", **settings)


def unsent(builder):
    return builder._assembly.side.unsent


def arenas(builder):
    return {name for _, name in builder._assembly.ring.places(builder._assembly.ring.capacity)}


def test_what_no_backend_declares_is_not_sent():
    builder = builder_of(backend("block_table", "seq_lens"))
    assert arenas(builder) - unsent(builder) == {"seq_lens", *OF_ENGINES}
    assert not unsent(builder_of(Backend(CONFIG)))  # without a spec nothing is known
    assert not unsent(builder_of(None))


def test_what_follows_from_a_declared_field_is_sent_with_it():
    builder = builder_of(backend("paged_kv_indices", "query_start_loc"))
    sent = arenas(builder) - unsent(builder)
    assert sent == {"paged_kv_indptr", "query_start_loc", "prefill_query_start_loc", *OF_ENGINES}


def test_the_backends_of_all_groups_are_asked():
    groups = [KVCacheGroup("full", 4), KVCacheGroup("window", 4, sliding_window=6)]
    batch = InputBatch(max_num_reqs=4, max_model_len=64, groups=groups)
    given = {"full": backend("seq_lens"), "window": backend("query_lens")}
    builder = builder_of(given, batch=batch)
    assert unsent(builder).isdisjoint({"seq_lens", "query_lens"})
    builder.close()
    assert not unsent(builder_of(given | {"window": None}, batch=batch))


def test_a_cross_group_is_sent_the_encoders_fields():
    groups = [KVCacheGroup("self", 4), KVCacheGroup("cross", 4, cross=True)]
    batch = InputBatch(max_num_reqs=2, max_model_len=64, groups=groups, max_encoder_len=64)
    builder = builder_of(backend("cross_slot_mapping"), batch=batch, max_num_encoder_tokens=32)
    assert unsent(builder).isdisjoint(name for name in arenas(builder) if name.startswith("encoder"))
    batch.add_request("a", {"self": [1], "cross": [2]}, encoder_seq_len=3)
    step = builder.build({"a": 2}).groups["cross"]
    for name in ("seq_lens", "seq_start_loc", "cross_slot_mapping", "paged_kv_indptr", "query_lens"):
        assert getattr(step, name).tolist() == getattr(step.host, name).tolist()


def test_fewer_bytes_are_sent(sides):
    least, most = builder_of(backend("block_table")), builder_of(Backend(CONFIG), batch=two_requests(None))
    for builder in (least, most):
        builder.build({"a": 3})
        builder._assembly.side.run(builder._assembly.side.issued)
    ((_, few),), ((_, many),) = (side.copied for side in sides)
    left_out = [FIELDS[name] for name in unsent(least)]
    assert many - few == sum(128 if np.dtype(field.dtype).itemsize * 32 <= 128 else 256 for field in left_out)


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("seed", range(3))
def test_a_field_that_is_asked_for_is_that_steps_and_every_later_ones(kernels, sides, depth, seed):
    chosen, seen = random.Random(seed), []
    batch = InputBatch(max_num_reqs=6, max_model_len=64, block_size=4, kernels=kernels)
    builder = builder_of(backend("block_table", "seq_lens"), batch=batch, depth=depth)
    side, wanted, asked = sides[0], [], set()
    for step in range(40):
        if len(batch) < 6 and chosen.random() < 0.5:
            batch.add_request(step, range(1 + 16 * step, 17 + 16 * step), chosen.randint(0, 20))
        for req_id in [name for name in batch.req_ids if batch.num_computed_tokens(name) > 56]:
            batch.remove_request(req_id)
        metadata = builder.build({name: chosen.randint(1, 5) for name in batch.req_ids if chosen.random() < 0.6})
        if chosen.random() < 0.3:
            asked.add(chosen.choice(ASKED))
        for name in (*OF_ENGINES, "seq_lens", *asked):
            value = getattr(metadata, name)
            wanted.append((step, name, getattr(metadata.host, name).tolist()))
            side._issue(lambda value=value, step=step, name=name: seen.append((step, name, value.tolist())))
    side.run(side.issued)
    assert [one for one in seen if "num_pages" not in one[1]] == [one for one in wanted if "num_pages" not in one[1]]
    known = {name for name in asked if name in FIELDS and "num_pages" not in name}
    assert unsent(builder) == arenas(builder) - {"seq_lens", *OF_ENGINES, *known, *implied(asked)}


def implied(asked):
    return {"paged_kv_indptr"} if "paged_kv_num_pages" in asked else set()


def test_what_is_asked_for_is_sent_once_more_in_its_own_copy_only(sides):
    builder = builder_of(backend("block_table"))
    side = sides[0]
    metadata = builder.build()
    assert metadata.query_lens.data_ptr() >= side._arena.data_ptr()
    side.run(side.issued)
    side.copied.clear()
    builder.build()
    side.run(side.issued)
    ((_, stop), (start, end)) = side.copied
    assert (end - start, start >= stop) == (128, True)


def test_the_field_of_an_older_step_is_its_own():
    builder = builder_of(backend("block_table"))
    older, last = builder.build({"a": 2}), builder.build({"b": 3})
    assert older.context_lens.tolist() == older.host.context_lens.tolist() == [6, 3]
    assert last.context_lens.tolist() == last.host.context_lens.tolist() == [5, 7]
    assert builder.build().context_lens.tolist() == [6, 10]


def test_a_plan_that_asks_ahead_gets_the_place_to_which_it_is_sent(kernels):
    class Planning(Backend):
        def plan(self, metadata):
            metadata.kept["lens"] = metadata.query_lens

    builder = builder_of(Planning(backend("block_table").config), kernels)
    for scheduled in ({"a": 2}, {"b": 3}, {}):
        metadata = builder.build(scheduled)
        assert metadata.kept["lens"].tolist() == metadata.host.query_lens.tolist()


@pytest.mark.parametrize("field", [True, False], ids=["fill", "plan"])
@pytest.mark.parametrize("name", sorted({*ASKED} - {"seq_lens"}))
def test_what_a_plan_takes_of_a_view_is_made_again_for_layers(kernels, name, field):
    """A view's numbers on the device are made of the step that is there: of the last one while the next is planned.
    The view itself stays: a plan of its own may be kept with it.
    """

    def looks(metadata, out=None):
        views = metadata.prefill_metadata, metadata.decode_metadata
        for one in (metadata, *views):
            _ = getattr(one, name).shape
        for view in views if out is None else ():
            view.kept["planned"] = metadata.step

    class Planning(Backend):
        def plan(self, metadata):
            if not field:
                looks(metadata)

    given = backend("block_table", "paged_kv_indices") if field else backend("block_table", "paged_kv_indices", name)
    builder = builder_of(Planning(given.config), kernels)
    if field:
        builder.register_field("own", np.int32, "request", looks)
    for scheduled in ({"a": 2}, {"b": 3}, {"a": 3}):
        metadata = builder.build(scheduled)
        for one in (metadata, metadata.prefill_metadata, metadata.decode_metadata):
            assert getattr(one, name).tolist() == getattr(one.host, name).tolist()
        planned = {} if field else {"planned": metadata.step}
        assert metadata.prefill_metadata.kept == metadata.decode_metadata.kept == planned


def test_inside_a_capture_nothing_is_copied_and_the_next_step_has_it(sides):
    builder = builder_of(backend("block_table"))
    metadata, side = builder.build({"a": 2}), sides[0]
    side.run(side.issued)
    issued, side.is_capturing = side.issued, lambda: True
    kept = metadata.query_lens
    assert side.issued == issued
    side.is_capturing = lambda: False
    builder.build({"a": 3})
    side.run(side.issued)
    assert kept.tolist() == [1, 3]


def test_a_captured_size_asked_for_behind_another_has_its_fixed_place(sides):
    """An engine captures all sizes first, and asks for fields of each when it makes the graph."""
    builder = builder_of(backend("block_table"))
    side = sides[0]
    side.send_with_all = lambda: None  # as on a device, where no stand-in reads the host's arrays
    for size in (2, 4):
        builder.capture(size)
    older = builder._assembly.shapes.captured[2].metadata[0]
    assert (older.step, builder.last_step, "query_lens" in unsent(builder)) == (0, 1, True)
    kept = older.query_lens
    assert 0 <= kept.data_ptr() - side._arena.data_ptr() < side._arena.numel()
    metadata = builder.build(bucket=2)
    side.run(side.issued)
    assert kept.tolist() == metadata.host.query_lens.tolist() == [1, 1]


@pytest.mark.parametrize("where", ["fill", "plan"])
@pytest.mark.parametrize("name", sorted({*ASKED} - {"seq_lens"}))
def test_a_build_that_is_refused_once_it_has_asked_leaves_the_last_step_its_fields(kernels, name, where):
    """The step that was to be sent with the field is not: the last one's is copied where it is asked for."""
    refuses = []

    class Planning(Backend):
        def plan(self, metadata):
            look(metadata, "plan")

    def look(metadata, place):
        if place in refuses:
            _ = getattr(metadata, name)
            raise KeyError(place)

    builder = builder_of(Planning(backend("seq_lens").config), kernels)
    builder.register_field("own", np.int32, "request", lambda metadata, out: look(metadata, "fill"))
    builder.build({"b": 3})
    last = builder.build({"a": 2})
    refuses.append(where)
    with pytest.raises(KeyError):
        builder.build({"a": 4})
    refuses.clear()
    assert builder.last_metadata is last
    assert getattr(last, name).tolist() == getattr(last.host, name).tolist()
    following = builder.build({"a": 3, "b": 2})
    assert getattr(following, name).tolist() == getattr(following.host, name).tolist()


@pytest.mark.parametrize("padded", [True, False])
@pytest.mark.parametrize("capturing", [True, False])
def test_a_captured_size_asked_for_behind_a_step_leaves_that_its_fields(sides, padded, capturing):
    """An engine reads them of what it captures over, or has, and the step that is there was sent without them."""
    builder = builder_of(backend("block_table"))
    side = sides[0]
    side.send_with_all = lambda: None  # as on a device, where no stand-in reads the host's arrays
    builder.capture(2)
    older = builder.build(bucket=2)
    last = builder.build({"b": 0}, bucket=2) if padded else builder.build({"a": 3})
    side.is_capturing = lambda: capturing
    kept = older.query_lens
    side.is_capturing = lambda: False
    side.run(side.issued)
    if padded and not capturing:  # every later step of the size is where its graph reads
        assert kept.tolist() == last.host.query_lens.tolist()
    found = last.query_lens
    side.run(side.issued)
    assert found.tolist() == last.host.query_lens.tolist() == ([1, 0] if padded else [1, 3])


def test_what_is_asked_for_inside_a_capture_is_copied_where_it_is_asked_for_behind_it(sides):
    builder = builder_of(backend("block_table"))
    metadata, side = builder.build({"a": 2}), sides[0]
    views = metadata.decode_metadata, metadata.prefill_metadata
    side.is_capturing = lambda: True
    kept = [one.query_lens for one in (metadata, *views)]
    side.is_capturing = lambda: False
    found = [one.query_lens for one in (*views, metadata)]
    side.run(side.issued)
    assert [one.tolist() for one in found] == [[1], [2], [1, 2]]
    builder.build({"a": 3})
    side.run(side.issued)
    assert kept[0].tolist() == [1, 3]  # where a graph reads it


def test_a_stand_in_graph_reads_all_host_fields():
    builder = builder_of(backend("block_table"))
    captured = builder.capture(2)
    builder.build(bucket=2)
    assert captured.host.context_lens.tolist() == [3, 6]
    assert not unsent(builder)


def test_a_field_asked_for_of_a_step_that_was_taken_back(sides):
    builder = builder_of(backend("block_table"))
    before = builder.build({"a": 2})
    builder._assembly.side.take_back(1)
    builder.build({"a": 1, "b": 2})
    builder._assembly.side.take_back(1)  # the arena on the device is no longer that of step 0
    assert before.query_lens.tolist() == [1, 2]
    assert "query_lens" in unsent(builder)


@pytest.mark.parametrize("seed", range(2))
def test_overlapping_steps_are_corrected_whatever_is_declared(kernels, seed):
    given = {
        group.name: Backend(config(backend("block_table", host_lengths="bounded").spec, group.tokens_per_column))
        for group in GROUPS
    }
    drafts_judged_late(kernels, seed, device="cpu", transport="copy", backend=given)
