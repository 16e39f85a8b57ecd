"""Sinks that are added to attention without: beside dense attention that has them."""

import math
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from attncore.dense import dense_attention  # noqa: E402
from attncore.ops.sinks_by_lse import SinksByLse  # noqa: E402

HEADS, SIZE = 6, 8
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def drawn(tokens=5, keys=9, scale=1.0):
    torch.manual_seed(tokens)
    query, key, value = torch.randn(tokens, HEADS, SIZE), torch.randn(keys, 2, SIZE), torch.randn(keys, 2, SIZE)
    return query * scale, key, value, torch.randn(HEADS) * 3


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("base2", [False, True])
@pytest.mark.parametrize("scale", [1.0, 60.0, 1e-3])
def test_attention_becomes_that_with_sinks(device, base2, scale):
    query, key, value, sinks = drawn(scale=scale)
    expected, expected_lse = dense_attention(query, key, value, scale=SIZE**-0.5, sinks=sinks, return_lse=True)
    output, lse = (one.to(device) for one in dense_attention(query, key, value, scale=SIZE**-0.5, return_lse=True))
    unit = math.log2(math.e) if base2 else 1.0
    lse = (lse * unit).t().contiguous().t()  # strides as libraries have them that put heads first
    SinksByLse(sinks.to(device), base2=base2)(output, lse)
    torch.testing.assert_close(output.cpu(), expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(lse.cpu() / unit, expected_lse, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("sign", [1, -1])
def test_a_row_without_keys_has_the_sink_alone(device, sign):
    sinks = torch.linspace(-2, 2, HEADS, device=device)
    output = torch.full((2, HEADS, SIZE), math.nan, device=device)
    output[1] = 1.0
    lse = torch.tensor([[sign * math.inf] * HEADS, [0.0] * HEADS], device=device)
    SinksByLse(sinks)(output, lse)
    assert not output[0].any()
    torch.testing.assert_close(lse[0], sinks)
    torch.testing.assert_close(output[1, :, 0], torch.sigmoid(-sinks))


@pytest.mark.parametrize("device", DEVICES)
def test_what_is_no_number_stays_so(device):
    output, lse = torch.ones(1, HEADS, SIZE, device=device), torch.zeros(1, HEADS, device=device)
    lse[0, 2] = math.nan
    SinksByLse(torch.zeros(HEADS, device=device))(output, lse)
    assert output.isnan().any(-1)[0].tolist() == [head == 2 for head in range(HEADS)]
    assert lse.isnan()[0].tolist() == [head == 2 for head in range(HEADS)]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_sinks_are_read_by_every_call_and_outputs_are_rounded_once(device, dtype):
    query, key, value, sinks = drawn(tokens=33, keys=40)
    held = torch.zeros(HEADS, device=device)
    add = SinksByLse(held)
    plain, lse = (one.to(device) for one in dense_attention(query, key, value, scale=SIZE**-0.5, return_lse=True))
    for new in (sinks, -sinks):
        held.copy_(new)
        wide = torch.empty(33, HEADS, 2 * SIZE, dtype=dtype, device=device)
        output, sums = wide[:, :, :SIZE], lse.clone()
        output.copy_(plain)
        exact = output.float() * torch.sigmoid(lse - held)[..., None]
        wide[:, :, SIZE:] = 7.0
        add(output, sums)
        torch.testing.assert_close(output.float(), exact, rtol=torch.finfo(dtype).eps, atol=1e-6)
        assert (wide[:, :, SIZE:] == 7.0).all()
    add(output[:0], lse[:0])


@pytest.mark.parametrize(
    ("output", "lse", "message"),
    [
        (torch.zeros(2, 5, 8), torch.zeros(2, 5), r"output: torch.float32 of shape \(2, 5, 8\) .* 6 heads"),
        (torch.zeros(2, 6, 8), torch.zeros(6, 2), r"lse: torch.float32 of shape \(6, 2\) found; give float32 \(2, 6\)"),
        (torch.zeros(2, 6, 8), torch.zeros(2, 6, dtype=torch.float64), "lse: torch.float64"),
        (torch.zeros(2, 6, 8, dtype=torch.int32), torch.zeros(2, 6), "output: torch.int32"),
        (torch.zeros(2, 8, 6).transpose(1, 2), torch.zeros(2, 6), "contiguous in the last dimension"),
        (torch.zeros(2, 6, 8), torch.zeros(2, 6, device="meta"), "lse: on meta, but the sinks are on cpu"),
    ],
)  # fmt: skip
def test_other_tensors_are_refused(output, lse, message):
    with pytest.raises(ValueError, match=message):
        SinksByLse(torch.zeros(6))(output, lse)


@pytest.mark.parametrize("wrong", ["output", "lse"])
@pytest.mark.parametrize("how", ["expanded", "of inference mode"])
def test_what_cannot_be_written_to_is_refused_before_anything_is_written(wrong, how):
    def made(*shape):
        with torch.inference_mode():
            return torch.ones(shape)

    tensors = {"output": torch.ones(2, 6, 8), "lse": torch.ones(2, 6)}
    shape = tensors[wrong].shape
    tensors[wrong] = made(*shape) if how != "expanded" else torch.ones(1, *shape[1:]).expand(shape)
    with pytest.raises(ValueError, match=f"^{wrong}: "):
        SinksByLse(torch.zeros(6))(*tensors.values())
    assert all((tensor == 1).all() for tensor in tensors.values())


def test_what_is_no_tensor_is_refused():
    with pytest.raises(TypeError, match="output: list found; give a tensor"):
        SinksByLse(torch.zeros(6))([1.0], torch.zeros(2, 6))
    with pytest.raises(TypeError, match="sinks: list found"):
        SinksByLse([0.0] * 6)
    for sinks in (torch.zeros(6, dtype=torch.bfloat16), torch.zeros(2, 3), torch.zeros(12)[::2]):
        with pytest.raises(ValueError, match=r"^sinks: .* give float32"):
            SinksByLse(sinks)


def test_heads_that_are_far_apart_in_memory():
    pytest.importorskip("triton", reason="triton is not installed")
    done = subprocess.run(
        [sys.executable, Path(__file__).parent / "interpreted_sinks.py"],
        env=os.environ | {"TRITON_INTERPRET": "1"}, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.stdout.strip() == "equal", done.stderr


@pytest.mark.parametrize(("heads", "size"), [(4, 256), (10, 64), (64, 64)])
def test_the_kernel_reads_all_logarithms_before_it_writes_one(heads, size):
    """Several threads of a program take a logarithm, in two places of the code: a barrier keeps writers behind them."""
    compiler = pytest.importorskip("triton.compiler", reason="triton is not installed")
    from triton.backends.compiler import GPUTarget

    from attncore.ops.sinks_by_lse_triton import scale_by_sinks

    tensors = {"output": "*bf16", "lse": "*fp32", "sinks": "*fp32"}
    numbers = dict.fromkeys(("num_tokens", "output_token", "output_head", "lse_token", "lse_head"), "i32")
    fixed = {"base2": True, "heads": heads, "size": size, "heads_up": 1 << (heads - 1).bit_length(), "size_up": size}
    fixed["wide"] = False
    signature = {name: (tensors | numbers).get(name, "constexpr") for name in scale_by_sinks.arg_names}
    source = compiler.ASTSource(scale_by_sinks, signature, fixed)
    ptx = compiler.compile(source, target=GPUTarget("cuda", 90, 32)).asm["ptx"]
    order = re.findall(r"\b(ld|st)\.global|\b(bar)\.sync", ptx)
    kinds = "".join({"ld": "l", "st": "s", "bar": "b"}[first or second] for first, second in order)
    assert re.fullmatch(r"[lb]*b+s+", kinds), kinds


@pytest.mark.gpu
@pytest.mark.parametrize(("heads", "size"), [(4, 256), (10, 64), (64, 64)])
def test_no_thread_reads_what_another_wrote(heads, size):
    """Over so many tokens that programs wait for one another: 6 % of those of 10 heads were wrong without a barrier."""
    sinks = torch.randn(heads, device="cuda") * 3
    for _ in range(20):
        output = torch.randn(100_000, heads, size, device="cuda", dtype=torch.bfloat16)
        lse = torch.randn(100_000, heads, device="cuda") * 3
        joined = torch.logaddexp(lse, sinks.expand_as(lse))
        expected = (output.float() * torch.exp(lse - joined).unsqueeze(-1)).bfloat16()
        SinksByLse(sinks)(output, lse)
        torch.testing.assert_close(lse, joined, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(output, expected, rtol=2e-2, atol=1e-3)
