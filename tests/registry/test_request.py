"""Requests: checked field by field, normalised, values."""

import dataclasses
from collections.abc import Mapping

import numpy as np
import pytest

from attncore import AttentionRequest, select

PLAIN = {"num_heads": 32, "num_kv_heads": 8, "head_size": 128, "dtype": "bfloat16"}


def request(**fields):
    return AttentionRequest(**{**PLAIN, **fields})


@pytest.mark.parametrize(
    ("field", "value", "error"),
    [
        ("num_heads", 0, ValueError),
        ("num_heads", 32.0, TypeError),
        ("num_kv_heads", 5, ValueError),
        ("head_size", True, TypeError),
        ("dtype", "half", ValueError),
        ("dtype", None, ValueError),
        ("dtype", np.array(["bfloat16"] * 2), ValueError),
        ("kv_cache_dtype", np.array([1, 2]), ValueError),
        ("kv_cache_dtype", "int4", ValueError),
        ("block_size", 0, ValueError),
        ("kv_cache_layout", "DHN", ValueError),
        ("sliding_window", -1, ValueError),
        ("logits_soft_cap", 0, ValueError),
        ("logits_soft_cap", float("nan"), ValueError),
        ("logits_soft_cap", True, ValueError),
        ("alibi", "odd", ValueError),
        ("alibi", np.array([1, 2]), ValueError),
        ("sinks", 1, TypeError),
        ("strided_kv_cache", 1, TypeError),
        ("features", ("wings",), ValueError),
        ("features", "sinks", TypeError),
        ("features", np.array(3), TypeError),
        ("features", (np.array([1, 2]),), ValueError),
        ("cuda_graph", "often", ValueError),
        ("phase", "both", ValueError),
        ("policy", "lenient", ValueError),
        ("head_size_v", 0, ValueError),
        ("use_mla", 1, TypeError),
        ("backend", "Flash", ValueError),
        ("prefer", "flash", TypeError),
        ("prefer", ("",), ValueError),
        ("exclude", (3,), ValueError),
        ("options", {"flash": 1}, TypeError),
        ("options", [], TypeError),
    ],
)
def test_mistakes_begin_with_the_fields_name(field, value, error):
    with pytest.raises(error) as caught:
        request(**{field: value})
    assert str(caught.value).startswith(f"{field}: ")


class Raises:
    """Raises whatever is asked of it: a collection, a mapping, a number, a name."""

    def _raise(self, *_):
        raise RuntimeError("ask me nothing")

    __iter__ = __len__ = __getitem__ = __float__ = __index__ = __bool__ = __repr__ = __str__ = __eq__ = _raise
    keys = values = items = _raise
    __hash__ = object.__hash__


class RaisesMapping(Raises, Mapping):
    pass


class Word(str):
    """A word whose own comparisons raise, or say what they like."""

    def __eq__(self, other):
        raise RuntimeError("not now")

    __hash__ = str.__hash__


@pytest.mark.parametrize("field", [field.name for field in dataclasses.fields(AttentionRequest)])
@pytest.mark.parametrize("value", [Raises(), RaisesMapping(), Word("no such word"), Word("")])
def test_what_an_objects_own_code_raises_names_the_field(field, value):
    with pytest.raises((ValueError, TypeError)) as caught:
        request(**{field: value})
    assert str(caught.value).startswith(f"{field}: ")


def test_words_of_a_subclass_of_str_become_plain_ones():
    one = request(dtype=Word("float16"), backend=Word("flash"), prefer=[Word("flash")], phase=Word("decode"))
    assert [type(word) for word in (one.dtype, one.backend, *one.prefer, one.phase)] == [str] * 4
    assert one == request(dtype="float16", backend="flash", prefer=["flash"], phase="decode")


def test_a_managers_block_must_be_a_multiple():
    with pytest.raises(ValueError, match="manager_block_size: 40 is not a multiple of block_size 16"):
        request(manager_block_size=40, block_size=16)


def test_fields_imply_features():
    one = request(sliding_window=4, logits_soft_cap=1, alibi="standard", sinks=True, features=["lse"])
    assert one.asked_features == ("alibi_standard", "logits_soft_cap", "lse", "sinks", "sliding_window")
    assert request(alibi=True).asked_features == ("alibi",)
    assert request().asked_features == ()


def test_fp8_is_e4m3():
    assert request(kv_cache_dtype="fp8").kv_cache_dtype == "fp8_e4m3"


def test_json_holds_what_was_asked_only():
    one = request(prefer=["flash"], sinks=True, options={"flash": {"x": 1}}, exclude={"rocm"})
    assert one.as_json() == {
        **PLAIN,
        "sinks": True,
        "prefer": ["flash"],
        "exclude": ["rocm"],
        "options": {"flash": {"x": 1}},
    }
    assert request(allow_compile=False).as_json() == {**PLAIN, "allow_compile": False}


def test_integers_of_numpy_are_integers():
    one = request(block_size=np.int64(16), num_heads=np.int32(8))
    assert (type(one.block_size), one.block_size, type(one.num_heads)) == (int, 16, int)
    with pytest.raises(TypeError, match=r"block_size: .* is not an integer"):
        request(block_size=np.float64(16))


def test_a_latent_cache_has_one_head_and_values_within_its_rows():
    latent = {"num_kv_heads": 1, "head_size": 576, "use_mla": True}
    assert request(**latent, head_size_v=512).head_size_v == 512
    with pytest.raises(ValueError, match=r"^num_kv_heads: 8 found; a latent cache \(use_mla\) has one head"):
        request(use_mla=True)
    with pytest.raises(ValueError, match=r"^head_size_v: 577 found; with use_mla values are the first columns"):
        request(**latent, head_size_v=577)


def test_a_device_is_the_hosts_or_the_backends():
    with pytest.raises(TypeError, match=r"^device: a request has no such field; host=Host.assume\('sm_90'\) names"):
        select(num_heads=8, num_kv_heads=8, head_size=64, dtype="float16", device="cuda")


def test_help_of_select_names_what_is_required():
    said = " ".join(select.__doc__.split())
    assert "`num_heads``, ``num_kv_heads``, ``head_size`` and ``dtype`` are required" in said
    assert "help(attncore.AttentionRequest)" in said
