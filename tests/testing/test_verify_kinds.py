"""``verify`` runs a backend and the reference over the same numbers, whatever the backend is for."""

import pytest

torch = pytest.importorskip("torch")

from planting import Site  # noqa: E402
from testing.faulty_backend import HEAVY, LIGHT  # noqa: E402

from attncore.registry.choice.select import select  # noqa: E402
from attncore.testing.verify_child import compared  # noqa: E402

WRONG = """
def forward(self, query, *given, **more):
    return 1.5 * super(Impl, self).forward(query, *given, **more)
Impl.forward = forward
"""
FP8 = "kv_cache_dtypes={'auto', 'fp8_e4m3', 'fp8_e5m2', 'bfloat16'}"
LATENT = "use_mla=True, mla_only=True, max_group_size=16"
KINDS = {
    "fp8_e4m3": (FP8, {"kv_cache_dtype": "fp8_e4m3"}),
    "fp8_e5m2": (FP8, {"kv_cache_dtype": "fp8_e5m2", "dtype": "bfloat16"}),
    "another dtype": (FP8, {"kv_cache_dtype": "bfloat16"}),
    "latent rows in fp8": (f"{LATENT}, {FP8}", {"kv_cache_dtype": "fp8_e4m3", "use_mla": True, "num_kv_heads": 1}),
    "decodes": ("phases={'decode'}", {"phase": "decode"}),
    "prefills": ("phases={'prefill'}", {"phase": "prefill"}),
    "short requests": ("max_model_len=40", {"block_size": 16}),
    "short requests, large blocks": ("max_model_len=40", {"block_size": 64}),
}


def verdict(site: Site, facts: str, asked: dict, code: str = ""):
    site.plugin("kind", LIGHT.format(name="kind", facts=f"dict({facts})"), heavy=HEAVY + code)
    given = {"num_heads": 4, "num_kv_heads": 2, "head_size": 16, "dtype": "float32", "backend": "kind", **asked}
    return compared(select(**given).create(device="cpu"), given)


@pytest.mark.parametrize(("facts", "asked"), KINDS.values(), ids=KINDS)
def test_a_right_backend_agrees(site, facts, asked):
    found = verdict(site, facts, asked)
    assert (found["state"], found["message"]) == ("agrees", "")
    assert found["steps"] >= 1


@pytest.mark.parametrize(("facts", "asked"), KINDS.values(), ids=KINDS)
def test_a_wrong_one_differs(site, facts, asked):
    assert verdict(site, facts, asked, WRONG)["state"] == "differs"


@pytest.mark.parametrize(
    ("longest", "says"), [(64, ", in contexts that the window of 64 tokens does not cut"), (65, "")]
)
def test_a_window_is_reached_where_a_request_may_be_longer(site, longest, says):
    found = verdict(site, f"max_model_len={longest}", {"sliding_window": 64})
    assert (found["state"], found["against"]) == ("agrees", f"reference and dense float32 attention{says}")


@pytest.mark.parametrize(
    ("largest", "window", "says"),
    [(260, 1024, ", in contexts that the window of 1024 tokens does not cut"), (261, 1024, ""), (31, None, "")],
)
def test_the_cache_has_no_more_blocks_than_the_spec_allows(site, largest, window, says):
    found = verdict(site, f"max_block_id={largest}", {"block_size": 16, "sliding_window": window})
    assert (found["state"], found["against"]) == ("agrees", f"reference and dense float32 attention{says}")


def test_a_backend_of_no_step_does_not_agree(site):
    with pytest.raises(ValueError, match=r"^max_model_len: 1 of its spec leaves no step to run$"):
        verdict(site, "phases={'decode'}, max_model_len=1", {"phase": "decode"})
