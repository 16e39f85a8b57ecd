"""Page indices are gathered from the live table: readable for as long as the step's rows are where they were."""

import numpy as np
import pytest

from attncore import AttncoreError
from attncore.builder import InputBatch, MetadataBuilder


def two_decodes(kernels, fill=None, **options):
    batch = InputBatch(max_num_reqs=4, max_model_len=64, block_size=4, kernels=kernels)
    builder = MetadataBuilder(batch, max_num_batched_tokens=64, depth=4, **options)
    if fill is not None:
        builder.register_field("extra", np.int32, "request", fill)
    batch.add_request("a", [1, 2, 3], 5)
    batch.add_request("b", [4, 5, 6], 5)
    return batch, builder


def refuse_prefills(metadata, out):
    if metadata.num_prefills:
        raise RuntimeError("no prefills")


def test_a_refused_build_leaves_them_readable(kernels):
    batch, builder = two_decodes(kernels, refuse_prefills)
    metadata = builder.build()
    before = metadata.host.paged_kv_indices.tolist()
    with pytest.raises(RuntimeError, match="no prefills"):
        builder.build({"a": 2})  # a prefill, which goes behind the decode
    assert batch.req_ids == ("a", "b")
    assert metadata.host.paged_kv_indices.tolist() == before == [1, 2, 4, 5]


def test_a_step_that_was_refused_never_finds_its_own_again(kernels):
    """What a field's function has kept of it: the number that the roll-back takes back is not given to another."""
    kept = []

    def keep(metadata, out):
        kept.append(metadata)
        refuse_prefills(metadata, out)

    batch, builder = two_decodes(kernels, keep)
    builder.build()
    with pytest.raises(RuntimeError):
        builder.build({"a": 2})
    batch.swap_rows(0, 1)
    with pytest.raises(AttncoreError):
        kept[-1].host.paged_kv_indices  # noqa: B018


def test_a_change_that_is_not_taken_back_makes_them_unreadable(kernels):
    batch, builder = two_decodes(kernels, refuse_prefills)
    metadata = builder.build()
    batch.swap_rows(0, 1)
    with pytest.raises(RuntimeError):
        builder.build({"a": 2})
    with pytest.raises(AttncoreError, match="blocks have moved or left"):
        metadata.host.paged_kv_indices  # noqa: B018


def test_an_abandoned_step_leaves_those_of_the_step_before_readable(kernels):
    torch = pytest.importorskip("torch")
    assert torch
    batch, builder = two_decodes(kernels)
    core = batch._core
    metadata = builder.build()
    before = metadata.host.paged_kv_indices.tolist()
    step = builder.build({"a": 2})
    assert step.moves
    with core.enter():
        core.undo.extend(core.move_back(step.moves))
        core.state.roll_back()
    assert metadata.host.paged_kv_indices.tolist() == before


@pytest.mark.parametrize("change", ["replace", "truncate", "remove", "preempt", "swap"])
def test_every_change_of_blocks_is_noted(kernels, change):
    batch, builder = two_decodes(kernels)
    metadata = builder.build()
    {
        "replace": lambda: batch.replace_block("a", 2, 9),
        "truncate": lambda: batch.truncate_blocks("a", 2),
        "remove": lambda: batch.remove_request("a"),
        "preempt": lambda: batch.preempt("b"),
        "swap": lambda: batch.swap_rows(0, 1),
    }[change]()
    with pytest.raises(AttncoreError, match="blocks have moved or left"):
        metadata.host.paged_kv_indices  # noqa: B018
