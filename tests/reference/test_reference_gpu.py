"""The same on a GPU: right, and without waiting for it."""

import pytest
import torch
from reference.encoder_cases import make_cross, make_encoder

from attncore import BackendConfig
from attncore.reference import ReferenceBackend, attncore_backend
from attncore.reference import cache as kv_cache
from attncore.testing.engines.engine import Engine
from attncore.testing.engines.run_batches import run_batch

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]

ROWS = [(9, 1), (0, 5), (300, 1), (7, 40), (12, 1), (0, 1), (4, 4)]
FEATURES = {
    "plain": {},
    "window": {"sliding_window": 5},
    "all": {
        "sliding_window": 6,
        "logits_soft_cap": 3.0,
        "alibi_slopes": [0.5, 0.25, 0.125, 0.0625],
        "sinks": [0.5] * 4,
    },
}
LATENT = {"num_kv_heads": 1, "head_size": 576, "head_size_v": 512, "use_mla": True}
CROSS = [(9, True, 5), (1, True, 40), (0, False, 2), (300, False, 1), (13, False, 3)]
CASES = {
    "latent": lambda paged_case: paged_case(ROWS, device="cuda", **LATENT),
    "encoder": lambda _: make_encoder([5, 1, 300, 4], features=FEATURES["all"], device="cuda"),
    "encoder_only": lambda _: make_encoder([5, 1, 300, 4], kind="encoder_only", device="cuda"),
    "cross": lambda _: make_cross(CROSS, features={"sinks": [0.5] * 4}, device="cuda"),
}


@pytest.mark.parametrize("features", FEATURES.values(), ids=FEATURES)
@pytest.mark.parametrize("head_size", [8, 64, 128])
def test_mixed_batch(paged_case, features, head_size):
    paged_case(ROWS, head_size=head_size, device="cuda", padded_tokens=2, **features).check()


@pytest.mark.parametrize("kind", CASES)
def test_other_kinds(paged_case, kind):
    CASES[kind](paged_case).check()


def test_latent_attention_in_bfloat16(paged_case):
    paged_case(ROWS, device="cuda", dtype="bfloat16", **LATENT).check(1e-2)


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
@pytest.mark.parametrize("kind", CASES)
def test_log_sum_exp_does_not_synchronise(paged_case, kind):
    case = CASES[kind](paged_case)
    layer = {} if kind == "latent" else {"attn_type": case.kind}
    impl = case.backend.impl("layer", **layer, **case.features)
    impl.forward_with_lse(**case.given())
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        output, _ = impl.forward_with_lse(**case.given())
    finally:
        torch.cuda.set_sync_debug_mode("default")
    expected = case.expected if kind == "latent" else case.expected[0]
    torch.testing.assert_close(output, expected, atol=5e-5, rtol=5e-5)


def test_bfloat16(paged_case):
    paged_case(ROWS, dtype="bfloat16", device="cuda").check(1e-2)


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
@pytest.mark.parametrize("features", FEATURES.values(), ids=FEATURES)
def test_forward_does_not_synchronise(paged_case, features):
    case = paged_case(ROWS, device="cuda", **features)
    impl = case.backend.impl("layer", **case.features)
    given = (case.query, case.key, case.value, case.cache, case.metadata)
    impl.forward(*given)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        output = impl.forward(*given)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.testing.assert_close(output, case.expected, atol=2e-5, rtol=2e-5)


def test_write_in_a_captured_graph():
    cache = kv_cache.allocate(4, 4, 2, 8, dtype=torch.float32, device="cuda")
    key, slots = torch.randn(3, 2, 8, device="cuda"), torch.tensor([5, -1, 9], device="cuda")
    kv_cache.write(key, key, cache, slots)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kv_cache.write(key, key, cache, slots)
    cache.zero_()
    slots.copy_(torch.tensor([-1, 3, -1]))
    graph.replay()
    assert torch.equal(cache[0, 0, 3], key[1])
    assert torch.count_nonzero(cache[:, :-1]) == 2 * key[1].numel()


def test_swap_between_devices():
    device = kv_cache.allocate(4, 4, 2, 8, dtype=torch.bfloat16, device="cuda").normal_()
    host = kv_cache.allocate(2, 4, 2, 8, dtype=torch.bfloat16)
    kv_cache.swap_blocks(device, host, [(3, 1)])
    assert torch.equal(host[:, 1], device[:, 3].cpu())
    kv_cache.swap_blocks(host, device, [(1, 0)])
    assert torch.equal(device[:, 0], device[:, 3])


@pytest.mark.parametrize("kv_cache_dtype", ["fp8_e4m3", "fp8_e5m2"])
@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_an_fp8_cache_on_the_device(kv_cache_dtype, layout):
    """Scales of each head: what the kit runs on a CPU, with the write that asks the device for nothing."""
    config = BackendConfig(
        num_heads=4, num_kv_heads=2, head_size=16, dtype="bfloat16", block_size=4, device="cuda",
        kv_cache_dtype=kv_cache_dtype, kv_cache_layout=layout, spec=attncore_backend(),
    )  # fmt: skip
    scales = {"k_scale": torch.tensor([4.0, 0.5]), "v_scale": torch.tensor([2.0, 8.0])}
    engine = Engine(ReferenceBackend(config), scale=0.0625, **scales)
    run_batch(engine, [(0, 5), (9, 1), (3, 6), (40, 2)])
