"""Fields of an engine's own, which register_field adds: they ride along with a step, and bad ones are refused."""

import numpy as np
import pytest
from builder.device.arena_batches import two_requests

from attncore.builder import MetadataBuilder
from attncore.builder.device.by_copy import CopyTransport
from attncore.builder.persistent import builder
from attncore.errors import AttncoreError, CaptureError


@pytest.fixture
def batch(kernels):
    return two_requests(kernels)


@pytest.mark.parametrize("transport", ["auto", "copy"])
def test_fields_of_an_engines_own_ride_along(batch, transport):
    made = MetadataBuilder(batch, max_num_batched_tokens=32, transport=transport)
    tokens = {"a": list(range(100, 164)), "b": list(range(200, 264))}

    def ids(metadata, out):
        for row, req_id in enumerate(metadata.req_ids):
            start, stop = metadata.host.query_start_loc[row : row + 2]
            first = metadata.host.context_lens[row]
            out[start:stop] = tokens[req_id][first : first + stop - start]

    made.register_field("input_ids", np.int64, "token", ids)
    made.register_field("temperature", np.float32, "request", lambda metadata, out: out.fill(0.5))
    metadata = made.build({"a": 3})
    assert metadata.req_ids == ("b", "a")
    assert metadata.input_ids.tolist() == metadata.host.input_ids.tolist() == [206, 103, 104, 105]
    assert metadata.temperature.tolist() == [0.5, 0.5]
    assert made.build().input_ids.tolist() == [207, 106]
    with pytest.raises(CaptureError, match="register fields before the first"):
        made.register_field("more", np.int32, "request", ids)


@pytest.mark.parametrize("transport", ["auto", "copy"])
def test_what_a_fill_takes_of_a_step_is_made_again_for_others(batch, transport):
    """A view's numbers on the device are made of the step that is there: of the last one while a field is filled."""
    names = ("logits_indices", "token_to_req_indices", "seq_start_loc", "paged_kv_indptr")
    taken = {}

    def steps_of(fill):
        made = MetadataBuilder(batch, max_num_batched_tokens=32, transport=transport)
        made.register_field("own", np.int32, "request", fill)
        for scheduled in ({"a": 3, "b": 5}, {"a": 4, "b": 2}):
            metadata = made.build(scheduled)
            view = metadata.prefill_metadata
            yield [getattr(view, name).tolist() for name in names], metadata.paged_kv_num_pages.tolist()
        made.close()
        batch.rollback_many({"a": 7, "b": 7})

    def takes(metadata, out):
        view = metadata.prefill_metadata
        taken[metadata.step] = [getattr(view, name) for name in names], metadata.paged_kv_num_pages

    expected = list(steps_of(lambda metadata, out: None))
    assert list(steps_of(takes)) == expected
    assert len(taken) == 2


def test_a_field_that_cannot_be_filled_undoes_the_step(batch):
    made = MetadataBuilder(batch, max_num_batched_tokens=32)

    def fails(metadata, out):
        raise KeyError("no such token")

    made.register_field("input_ids", np.int32, "token", fails)
    with pytest.raises(KeyError, match="no such token"):
        made.build({"a": 3})
    assert (batch.num_computed_tokens("a"), batch.req_ids) == (3, ("a", "b"))


@pytest.mark.parametrize(
    ("name", "dtype", "per", "message"),
    [
        ("seq_lens", np.int32, "request", "name: 'seq_lens' is not a free name"),
        ("two words", np.int32, "request", "is not a free name"),
        ("num_reqs", np.int32, "request", "is not a free name"),
        *(
            (name, np.int32, "request", f"name: '{name}' is not a free name")
            for name in ("host", "groups", "group", "use_cuda_graph", "_arena", "_arrays", "_mine", "__dict__")
        ),
        ("ids", "U4", "request", "dtype: <U4 is not one of numbers"),
        ("ids", np.int32, "block", "per: 'block' is neither token nor request"),
    ],
)
def test_fields_are_checked(batch, name, dtype, per, message):
    made = MetadataBuilder(batch, max_num_batched_tokens=32)
    with pytest.raises((ValueError, TypeError), match=message):
        made.register_field(name, dtype, per, lambda metadata, out: None)
    assert made.build().seq_lens.tolist() == [4, 7]


def ones(metadata, out):
    out[:] = 1


@pytest.mark.parametrize("transport", ["auto", "copy"])
def test_a_closed_builder_takes_no_field(batch, transport):
    """It would take new memory for the field, and build again."""
    made = MetadataBuilder(batch, max_num_batched_tokens=32, transport=transport)
    made.close()
    with pytest.raises(AttncoreError, match="builder: closed; make another one"):
        made.register_field("ones", np.int32, "request", ones)
    with pytest.raises(AttncoreError, match="builder: closed"):
        made.build()


@pytest.mark.parametrize("transport", ["auto", "copy"])
def test_a_field_for_which_there_is_no_memory_changes_nothing(batch, monkeypatch, transport):
    made = MetadataBuilder(batch, max_num_batched_tokens=32, transport=transport)
    made.register_field("ones", np.int32, "request", ones)
    nbytes = made.nbytes

    def no_memory(*args):
        raise MemoryError("arenas: no memory")

    with monkeypatch.context() as patch:
        patch.setattr(builder, "Assembly", no_memory)
        with pytest.raises(MemoryError, match="arenas: no memory"):
            made.register_field("more", np.int32, "request", ones)
    assert made.nbytes == nbytes
    metadata = made.build()
    assert metadata.ones.tolist() == [1, 1]
    assert not hasattr(metadata, "more")


def test_the_name_of_a_field_without_memory_is_free(batch, monkeypatch):
    made = MetadataBuilder(batch, max_num_batched_tokens=32)
    with monkeypatch.context() as patch:
        patch.setattr(builder, "Assembly", None)
        with pytest.raises(TypeError):
            made.register_field("ones", np.int32, "request", ones)
    made.register_field("ones", np.int32, "request", ones)
    assert made.build().ones.tolist() == [1, 1]


def test_memory_that_a_field_replaces_is_given_back(batch, monkeypatch):
    closed = []
    monkeypatch.setattr(CopyTransport, "close", lambda side: closed.append(side))
    made = MetadataBuilder(batch, max_num_batched_tokens=32, transport="copy")
    side = made._assembly.side
    made.register_field("ones", np.int32, "request", ones)
    assert closed == [side]


class TwoNames(str):
    """Hashes as no name of metadata once, and as its text from then on."""

    asked = 0

    def __hash__(self):
        TwoNames.asked += 1
        return 99 if TwoNames.asked == 1 else str.__hash__(self)


def test_a_name_that_answers_otherwise_the_second_time_takes_no_fields_place(batch):
    made = MetadataBuilder(batch, max_num_batched_tokens=32)
    with pytest.raises(ValueError, match="name: 'positions' is not a free name"):
        made.register_field(TwoNames("positions"), np.int64, "request", lambda metadata, out: None)
    assert made.build({"a": 20}).positions.shape == (21,)


def test_a_name_is_kept_as_a_plain_str(batch):
    made = MetadataBuilder(batch, max_num_batched_tokens=32)
    made.register_field(TwoNames("extra"), np.int64, TwoNames("token"), lambda metadata, out: None)
    with pytest.raises(ValueError, match="name: 'extra' is registered already"):
        made.register_field(TwoNames("extra"), np.int64, "token", lambda metadata, out: None)
    assert [type(name) for name in made._engine_fields.registered] == [str]
