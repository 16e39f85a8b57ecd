"""What batches, builders and metadata print: bounded, current, and without touching what they describe."""

import copy
import pickle

import numpy as np
import pytest

from attncore.builder import (
    CommonMetadataBuilder,
    InputBatch,
    KVCacheGroup,
    MetadataBuilder,
    Sequence,
    SequenceGroup,
    metadata_from_fields,
)
from attncore.builder.persistent.host_fields import HostFields


def builder_of(kernels="cython", **options):
    """A builder over a decode and a request of six new tokens."""
    batch = InputBatch(max_num_reqs=8, max_model_len=64, block_size=4, kernels=kernels)
    builder = MetadataBuilder(batch, max_num_batched_tokens=64, **options)
    batch.add_request("a", [1, 2, 3], 5)
    batch.add_request("b", [4, 5, 6])
    return builder


def list_step(layout="flash"):
    groups = [SequenceGroup(True, [Sequence(0, 6, 0, [1, 2])]), SequenceGroup(False, [Sequence(1, 1, 9, [3, 4, 5])])]
    return CommonMetadataBuilder(4, layout).build(groups)


def every_object():
    builder = builder_of()
    metadata = builder.build({"b": 6})
    lists = list_step()
    sent = metadata_from_fields(metadata.asdict_zerocopy())
    return [builder.batch, builder, metadata, metadata.host, metadata.decode_metadata, metadata.decode_metadata.host,
            lists, lists.host, lists.source.builder, lists.prefill_metadata, sent, sent.host]  # fmt: skip


def test_a_batch_says_what_it_holds(kernels):
    batch = builder_of(kernels).batch
    assert repr(batch) == (
        "<InputBatch: 2 of 8 requests, 5 tokens computed, 6 blocks of 4 tokens held,\n"
        f" max_model_len 64, {kernels}>"
    )  # fmt: skip
    batch.preempt("a")
    batch.add_request("c", [9])
    batch.remove_request("b")
    assert repr(batch).startswith("<InputBatch: 2 of 8 requests, 1 preempted, 0 tokens computed,\n 1 block of 4 tokens")


def test_the_builders_say_what_they_build(monkeypatch):
    monkeypatch.delenv("ATTNCORE_KERNELS", raising=False)  # the default kernels
    builder = builder_of(decode_threshold=2)
    builder.capture(4)
    builder.build()
    assert repr(builder) == (
        "<MetadataBuilder: last step 1, 2 of 8 requests, max_num_batched_tokens 64,\n"
        " decode_threshold 2, captured sizes 4, depth 2, NumPy arrays, transport none,\n cython>"
    )
    builder.close()
    assert "closed" in repr(builder)
    assert repr(CommonMetadataBuilder(16, "rocm", sliding_window=8, encoder_decoder=True)) == (
        "<CommonMetadataBuilder: layout rocm, block_size 16, sliding_window 8,\n"
        " encoder_decoder, NumPy arrays, cython>"
    )  # fmt: skip


def test_a_step_says_its_requests_tokens_and_lengths(kernels):
    builder = builder_of(kernels)
    assert repr(builder.build({"b": 6})) == (
        "<StepMetadata of step 0: 2 requests, 7 tokens, 1 decode of 1 token,\n"
        " 1 prefill of 6 tokens, seq_lens [6, 6], query_lens [1, 6], NumPy arrays>"
    )
    assert "2 decodes (2 tokens in all)" in repr(builder.build()).replace("\n", "")
    builder.capture(4)
    assert "2 requests padded to 4 (bucket), 2 tokens padded to 4" in repr(builder.build(bucket=4)).replace("\n", "")
    assert repr(list_step()) == (
        "<CommonAttentionMetadata: 2 requests, 7 tokens, 1 decode of 1 token,\n"
        " 1 prefill of 6 tokens, seq_lens [6, 10], query_lens [6, 1], NumPy arrays>"
    )


def test_an_older_step_says_so():
    builder = builder_of()
    first = builder.build({"b": 6})
    view = first.decode_metadata
    assert "OLDER" not in repr(first)
    builder.build()
    for older in (first, view, copy.copy(first)):
        assert "of step 0: an OLDER step: step 1 was built since" in repr(older)
    third = builder.build()
    assert third is first
    assert "OLDER" not in repr(third)
    assert "STALE" not in repr(third)
    assert repr(view).endswith("of step 0:\n STALE: step 2 was built since and this arena is used again (depth)>")
    assert "seq_lens" not in str(view)


def test_a_step_of_another_shape_is_stale_too():
    """The arena of a padded step is taken by eager ones, whose metadata are other objects."""
    builder = builder_of()
    builder.capture(2)
    padded = builder.build(bucket=2)
    for _ in range(2):
        builder.build()
    assert "STALE" in repr(padded)


def test_a_poisoned_step_prints_and_expires(monkeypatch):
    monkeypatch.setenv("ATTNCORE_POISON", "1")
    builder = builder_of()
    first = builder.build()
    assert "StepMetadata of step 0: 2 requests" in repr(first)
    assert "slot_mapping" in dir(first)
    for _ in range(2):
        builder.build()
    assert repr(first) == str(first) == "<StepMetadata of step 0: STALE: its arena was taken by step 2>"
    with pytest.raises(TypeError, match="asdict_zerocopy"):
        pickle.dumps(first)


def test_nothing_is_kept_or_changed():
    for one in every_object():
        before = dict(vars(one))
        for show in (repr, str, dir, lambda it: it._repr_html_() if hasattr(type(it), "_repr_html_") else "none"):
            assert show(one)
        assert vars(one).keys() == before.keys()
        assert all(value is before[name] for name, value in vars(one).items())


def test_no_view_of_an_arena_is_kept(kernels):
    metadata = builder_of(kernels).build({"b": 6})
    before = vars(metadata).keys() | vars(metadata.host).keys()
    for show in (repr, str, dir, type(metadata)._repr_html_, lambda one: repr(one.host), lambda one: dir(one.host)):
        show(metadata)
        assert vars(metadata).keys() | vars(metadata.host).keys() == before


def test_no_tensor_is_touched():
    """The wrap, which puts an array on a device, is not called."""
    builder = builder_of()
    metadata = builder.build()

    class Device:
        config = type("Config", (), {"device": "cuda:3"})

        def from_host(self, array):
            raise AssertionError("touched")

    metadata._wrap = Device().from_host
    metadata._device = dict.fromkeys(metadata._arrays, 0)
    assert "tensors on cuda:3" in str(metadata)
    assert metadata._repr_html_()


def test_large_batches_print_a_few_lines():
    count = 100_000
    batch = InputBatch(max_num_reqs=count, max_model_len=512, block_size=4)
    for index in range(count):
        batch.add_request(f"{'long' * 99}{index}", range(1, 101), 390)
    builder = MetadataBuilder(batch, max_num_batched_tokens=2 * count)
    metadata = builder.build()
    for one in (batch, builder, metadata, metadata.host):
        for text in (repr(one), str(one)):
            lines = text.splitlines()
            assert len(lines) <= 20, text
            assert max(map(len, lines)) <= 80, text
    assert len(batch._repr_html_()) < 200_000


def test_objects_that_are_half_made_print():
    for one in every_object():
        half = type(one).__new__(type(one))
        for text in (repr(half), str(half)):
            assert text.startswith("<")
            assert "\n" not in text


def test_names_of_fields_complete(kernels):
    builder = builder_of(kernels)
    builder.register_field("num_drafts", np.int32, "request", lambda metadata, out: None)
    metadata = builder.build()
    for one in (metadata, metadata.host):
        assert {"slot_mapping", "seq_lens", "paged_kv_num_pages", "num_drafts"} <= set(dir(one))
        assert "cross_slot_mapping" not in dir(one)
        for name in {"slot_mapping", "paged_kv_indices", "paged_kv_num_pages"} & set(dir(one)):
            assert getattr(one, name) is not None
    flash, pages = list_step(), list_step("flashinfer")
    for one, has_pages in ((flash, False), (flash.host, False), (pages, True), (pages.host, True)):
        assert "slot_mapping" in dir(one)
        assert ("paged_kv_indices" in dir(one)) is has_pages
    assert "slot_mapping" in dir(metadata.decode_metadata)


def test_a_misspelt_field_names_the_one_that_was_meant():
    for one in every_object():
        if not hasattr(one, "slot_mapping"):
            continue
        with pytest.raises(AttributeError, match=r"has no field 'slot_maping'; did you mean slot_mapping\?"):
            _ = one.slot_maping
        with pytest.raises(AttributeError, match=r"has no field 'telepathy'$"):
            _ = one.telepathy
    with pytest.raises(AttributeError, match="has no field 'cross_slot_mapping' in this step"):
        _ = list_step().cross_slot_mapping


def test_a_field_of_an_engine_does_not_hide_what_host_has():
    builder = builder_of()
    for name in ("peek", "table_changed"):
        assert hasattr(HostFields, name)
        with pytest.raises(ValueError, match=f"name: '{name}' is not a free name"):
            builder.register_field(name, np.int32, "request", print)


def test_pickle_names_what_to_send_and_copies_work():
    builder = builder_of()
    for metadata in (builder.build({"b": 6}), list_step()):
        for refused in (pickle.dumps, copy.deepcopy):
            with pytest.raises(TypeError, match=r"^metadata: .* send metadata\.asdict_zerocopy\(\)"):
                refused(metadata)
        copied = copy.copy(metadata)
        assert copied.seq_lens.tolist() == metadata.seq_lens.tolist()
        arrived = metadata_from_fields(pickle.loads(pickle.dumps(metadata.asdict_zerocopy())))
        assert arrived.slot_mapping.tolist() == metadata.slot_mapping.tolist()


def test_pickle_of_the_host_names_what_to_send(kernels):
    host = builder_of(kernels).build({"b": 6}).host
    for refused in (pickle.dumps, copy.deepcopy):
        with pytest.raises(TypeError, match=r"^metadata\.host: .* send metadata\.asdict_zerocopy\(\)"):
            refused(host)
    assert copy.copy(host).seq_lens.tolist() == [6, 6]


def test_a_step_without_requests_has_no_lengths():
    assert "0 tokens, seq_lens [], query_lens []," in repr(builder_of().build({"a": 0, "b": 0})).replace("\n", "")


def test_groups_are_told_apart():
    groups = [KVCacheGroup("full", 4), KVCacheGroup("large", 8, num_blocks=9)]
    batch = InputBatch(max_num_reqs=4, max_model_len=32, groups=groups)
    builder = MetadataBuilder(batch, max_num_batched_tokens=32)
    batch.add_request("a", {"full": [1, 2], "large": [3]}, 5)
    assert "group 'large': 1 of 9 blocks of 8 tokens held" in repr(batch)
    assert "group 'large' of 2" in repr(builder.build().groups["large"])
