"""Steps that no builder of this process made: a field that the backend's spec declares and they lack is named."""

import pytest

torch = pytest.importorskip("torch")

from attncore import AttentionRequest, select  # noqa: E402
from attncore.builder import (  # noqa: E402
    CommonAttentionMetadata,
    CommonMetadataBuilder,
    InputBatch,
    KVCacheGroup,
    MetadataBuilder,
    Sequence,
    SequenceGroup,
    metadata_from_fields,
)
from attncore.builder.fields import ENCODER_ARRAYS, OPTIONAL  # noqa: E402
from attncore.builder.slices import HostArrays  # noqa: E402


@pytest.fixture
def backend():
    return select(
        AttentionRequest(num_heads=2, num_kv_heads=1, head_size=8, dtype="float32", backend="reference")
    ).create()


@pytest.fixture
def sent(backend):
    batch = InputBatch(max_num_reqs=2, max_model_len=64, block_size=backend.config.block_size)
    batch.add_request("a", [1, 2], 3)
    return MetadataBuilder(batch, backend, max_num_batched_tokens=64).build({"a": 4}).asdict_zerocopy()


def needs(backend):
    spec = backend.spec
    return sorted((spec.host_needs | spec.device_needs) - ENCODER_ARRAYS - OPTIONAL)


def test_a_step_with_the_declared_fields_alone_is_taken(backend, sent):
    kept = {*needs(backend), "num_reqs"}
    arrived = metadata_from_fields(
        {name: sent[name] for name in sent if name in kept or not is_array(sent[name])}, backend
    )
    assert not hasattr(arrived, "positions")
    layer = backend.impl("layers.0", scale=1.0)
    query, key = torch.ones(4, 2, 8), torch.ones(4, 1, 8)
    output = layer.forward(query, key, key, backend.allocate_kv_cache(4), arrived)
    assert output.shape == query.shape


def is_array(value):
    return hasattr(value, "shape")


@pytest.mark.parametrize("name", ["block_table", "context_lens", "query_start_loc", "seq_lens", "slot_mapping"])
def test_a_declared_field_that_is_missing_is_named(backend, sent, name):
    assert needs(backend) == ["block_table", "context_lens", "query_start_loc", "seq_lens", "slot_mapping"]
    del sent[name]
    where = "device_needs" if name == "block_table" else "host_needs"
    with pytest.raises(ValueError, match=rf"^metadata: no field {name}, which reference reads \({where}\)"):
        metadata_from_fields(sent, backend)
    metadata_from_fields(sent)  # for no backend there is nothing to miss


def test_a_mask_of_draft_trees_is_missed_in_no_step(backend, sent):
    """It is declared, and a step without it has no trees."""
    assert "tree_mask" in backend.spec.host_needs
    assert "tree_mask" not in sent
    backend.check_metadata(metadata_from_fields(sent, backend))


def test_metadata_of_an_engines_own_is_checked_when_it_asks(backend, sent):
    host = HostArrays(**{name: value.numpy() for name, value in sent.items() if is_array(value) and name != "seq_lens"})
    counts = {name: value for name, value in sent.items() if not is_array(value)}
    with pytest.raises(ValueError, match=r"^metadata: no field seq_lens"):
        backend.check_metadata(CommonAttentionMetadata(host, backend.from_host, **counts))


def test_fields_of_encoders_are_missed_only_where_there_are_encoder_tokens(backend):
    builder = CommonMetadataBuilder(backend.config.block_size, encoder_decoder=True, backend=backend)
    step = builder.build([SequenceGroup(True, [Sequence(0, 2, 0, [1])], False, 3, [2])])
    sent = step.asdict_zerocopy()
    metadata_from_fields(sent, backend)
    with pytest.raises(ValueError, match=r"^metadata: no field cross_block_table"):
        metadata_from_fields({name: value for name, value in sent.items() if name != "cross_block_table"}, backend)


def test_a_cross_groups_step_has_no_slot_mapping(backend):
    size = backend.config.block_size
    groups = [KVCacheGroup("self", size), KVCacheGroup("cross", size, cross=True)]
    batch = InputBatch(max_num_reqs=2, max_model_len=64, groups=groups, max_encoder_len=64)
    batch.add_request("a", {"self": [1], "cross": [2]}, encoder_seq_len=5)
    step = MetadataBuilder(batch, backend, max_num_batched_tokens=64, max_num_encoder_tokens=64).build({"a": 2})
    sent = step.groups["cross"].asdict_zerocopy()
    assert "slot_mapping" not in sent
    assert metadata_from_fields(sent, backend).num_encoder_tokens == 5
