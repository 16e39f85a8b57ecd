"""The values of the contract travel: they pickle to worker processes, compare, and serve as keys."""

import copy
import json
import pickle

import pytest
from lookalikes import FLASH, FLASHINFER, PACKAGES

from attncore import AttentionRequest, BackendConfig, BackendSpec, Host, Reason

REQUEST = AttentionRequest(
    num_heads=8, num_kv_heads=2, head_size=64, dtype="float16", prefer=["flash"], options={"flashinfer": {"x": 1}}
)
VALUES = [
    REQUEST,
    Host.assume("sm_90", packages=PACKAGES),
    BackendConfig(8, 2, 64, "float16", 16, options={"x": 1}, spec=FLASH),
    FLASH,
    FLASHINFER,
    Reason("dtype", "a sentence", "float32", ["float16"], "me", "you"),
]


@pytest.mark.parametrize("value", VALUES, ids=lambda value: type(value).__name__)
def test_values_survive_pickle_and_copies(value):
    for other in (pickle.loads(pickle.dumps(value)), copy.copy(value), copy.deepcopy(value)):
        assert type(other) is type(value)
        assert other == value
        if isinstance(value, BackendSpec):
            assert other.by_variant == value.by_variant


def test_requests_and_hosts_serve_as_keys():
    same = AttentionRequest(**{**vars(REQUEST), "prefer": ("flash",)})
    assert {REQUEST: 1}[same] == 1
    assert len({Host.assume("sm_90"), Host.assume("cuda:sm_90"), Host.assume("cpu")}) == 2


def test_mappings_inside_cannot_be_changed():
    with pytest.raises(TypeError):
        FLASH.devices["any"] = 1
    assert not hasattr(FLASH.devices, "update")
    assert FLASH.devices == {"cuda:sm_80+": 60}
    assert repr(FLASH.devices) == "{'cuda:sm_80+': 60}"


def test_a_reason_is_json_whatever_it_holds():
    loop = []
    loop.append(loop)
    reason = Reason("check", "a\ud800\nb", asked=object, accepted={"x": {1.5}, "y": float("nan"), "z": loop})
    found = reason.as_json()
    assert found["message"] == "a\\ud800 b"
    assert found["asked"] == "<class 'object'>"
    assert (found["accepted"]["x"], found["accepted"]["y"]) == ([1.5], "nan")
    json.dumps(found, allow_nan=False).encode()
