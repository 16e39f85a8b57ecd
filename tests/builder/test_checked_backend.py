"""What takes a backend refuses a Choice, a class and anything else by name, before it does anything."""

import pytest

import attncore
from attncore.builder import metadata_from_fields


def batch():
    made = attncore.InputBatch(max_num_reqs=2, max_model_len=64, block_size=16)
    made.add_request("a", [1])
    return made


def adopted(backend):
    return attncore.AdoptedSteps(backend, max_num_reqs=2, max_num_tokens=8, max_model_len=64, num_blocks=4)


def received(backend):
    metadata = attncore.MetadataBuilder(batch(), max_num_batched_tokens=8).build()
    return metadata_from_fields(metadata.asdict_zerocopy(), backend)


MAKES_ONE = "attncore.select(...).create() makes one"
DOORS = {
    "MetadataBuilder": lambda backend: attncore.MetadataBuilder(batch(), backend, max_num_batched_tokens=8),
    "MetadataBuilder by group": lambda backend: attncore.MetadataBuilder(
        batch(), {"decoder": backend}, max_num_batched_tokens=8
    ),
    "CommonMetadataBuilder": lambda backend: attncore.CommonMetadataBuilder(16, backend=backend),
    "AdoptedSteps": adopted,
    "metadata_from_fields": received,
}


@pytest.mark.parametrize("door", DOORS)
def test_what_is_no_backend_is_refused_by_name(door, monkeypatch):
    monkeypatch.delenv("ATTNCORE_BACKEND", raising=False)
    cpu = attncore.Host.assume("cpu")
    choice = attncore.select(num_heads=2, num_kv_heads=2, head_size=16, dtype="float32", block_size=16, host=cpu)
    wrong = {
        "a Choice is not a backend; choice.create() makes one": choice,
        f"AttentionBackend is a class, not a backend; {MAKES_ONE}": attncore.AttentionBackend,
        f"'flash' is not a backend; {MAKES_ONE}": "flash",
    }
    for text, backend in wrong.items():
        with pytest.raises(TypeError) as refused:
            DOORS[door](backend)
        assert str(refused.value) == f"backend: {text}"
