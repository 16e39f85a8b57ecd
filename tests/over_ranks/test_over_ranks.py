"""attncore.ranks: layers over keys that ranks share out give what one rank with all keys gives."""

import os
import pathlib
import subprocess
import sys
from importlib.metadata import version

import numpy as np
import pytest
from packaging.version import Version

torch = pytest.importorskip("torch")

import torch.distributed as dist  # noqa: E402
from integrations.start_ranks import started  # noqa: E402

from attncore import BackendConfig, InputBatch, MetadataBuilder, select  # noqa: E402
from attncore.builder import ContextParallel, metadata_from_fields  # noqa: E402
from attncore.merge import merge_attention  # noqa: E402
from attncore.ranks import over_ranks  # noqa: E402
from attncore.ranks.exchange import Exchange  # noqa: E402
from attncore.reference import ReferenceBackend  # noqa: E402

HERE = pathlib.Path(__file__).parent
pytestmark = pytest.mark.skipif(not dist.is_gloo_available(), reason="torch has no gloo")


def make_backend():
    return ReferenceBackend(BackendConfig(4, 2, 8, "float32", 4))


@pytest.fixture
def alone():
    """torch.distributed with this process as its only rank."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("count", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_ranks_attend_over_all_keys(count):
    codes, said = started(HERE / "attending_rank.py", count=count)
    assert codes == [0] * count, said


@pytest.mark.parametrize(
    "given",
    [None, ContextParallel(2, 0, 4), ContextParallel(2, 1, 4, interleave=2), ContextParallel(1, 0, 4)],
)
def test_a_builder_of_another_share_than_the_layers_is_refused(alone, monkeypatch, given):
    """Its steps would have slots of tokens that the layers take for another rank's."""
    monkeypatch.setattr(dist, "get_rank", lambda group=None: 1)
    monkeypatch.setattr(dist, "get_world_size", lambda group=None: 2)
    share = ContextParallel(2, 1, 4)
    backend = over_ranks(make_backend(), share)
    batch = InputBatch(max_num_reqs=1, max_model_len=64, block_size=given.virtual_block_size if given else 4)
    with pytest.raises(ValueError, match=r"^context_parallel: .* given, but the layers of backend 'reference' attend"):
        MetadataBuilder(batch, backend, max_num_batched_tokens=8, context_parallel=given)
    batch = InputBatch(max_num_reqs=1, max_model_len=64, block_size=8)
    MetadataBuilder(batch, backend, max_num_batched_tokens=8, context_parallel=ContextParallel(2, 1, 4))


def test_the_kernel_merges_what_torch_does():
    pytest.importorskip("triton", reason="triton is not installed")
    done = subprocess.run(
        [sys.executable, HERE / "interpreted_merge.py"],
        env=os.environ | {"TRITON_INTERPRET": "1"}, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.stdout.strip() == "equal", done.stderr


@pytest.mark.parametrize("target", [("cuda", 90, 32), ("hip", "gfx942", 64)])
def test_the_kernel_compiles_for(target):
    compiler = pytest.importorskip("triton.compiler", reason="triton is not installed")
    from triton.backends.compiler import GPUTarget

    from attncore.ranks.merge_kernel import _merge

    if target[0] == "hip" and Version(version("triton")) < Version("3.6"):
        pytest.skip("this Triton looks for ROCm's linker; attn-rocm needs 3.6")
    numbers = dict.fromkeys(("part", "lse_part", "token_stride", "head_stride"), "i64") | {"heads": "i32"}
    tensors = {"outputs": "*bf16", "merged": "*bf16", "lses": "*fp32", "merged_lse": "*fp32"}
    fixed = {"ranks": 2, "size": 80, "size_up": 128}
    signature = {name: (numbers | tensors).get(name, "constexpr") for name in _merge.arg_names}
    compiler.compile(compiler.ASTSource(_merge, signature, fixed), target=GPUTarget(*target))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(5, 4, 8), (1, 1, 1), (3, 1, 5), (0, 4, 8)])
def test_a_part_is_sent_as_one_buffer(monkeypatch, dtype, shape):
    mine, other = (Exchange(shape, dtype, "cpu") for _ in range(2))
    parts = [(torch.randn(shape).to(dtype), torch.randn(shape[:2])) for _ in range(2)]
    for one, (output, lse) in zip((mine, other), parts, strict=True):
        one.output.copy_(output)
        one.lse.copy_(lse)
    monkeypatch.setattr(dist, "get_world_size", lambda group: 2)
    sent = []

    def gather(received, buffer, group):
        sent.append(buffer.numel())
        received.view(2, -1).copy_(torch.stack((buffer, other._sent)))

    monkeypatch.setattr("attncore.ranks.exchange._all_gather", gather)
    output = torch.empty(shape, dtype=dtype)
    found, lse = mine.merged(None, output)
    expected = merge_attention(*zip(*parts, strict=True))
    assert found is output
    assert torch.equal(found, expected[0])
    assert torch.equal(lse, expected[1])
    assert sent == [mine.nbytes]
    assert 0 <= mine.nbytes - shape[0] * shape[1] * (shape[2] * dtype.itemsize + 4) < 32


def test_documentation_says_what_a_layer_sends():
    text = (HERE.parents[1] / "docs" / "scale.md").read_text()
    for tokens in (1, 64):
        assert f"{Exchange((tokens, 32, 128), torch.bfloat16, 'cpu').nbytes:,} bytes" in text


def test_the_snippet_of_the_documentation_runs():
    text = (HERE.parents[1] / "docs" / "scale.md").read_text()
    snippet = text.split("```python\n")[2].split("```")[0]
    names = {}
    exec(compile(snippet, "docs/scale.md", "exec"), names)
    assert names["output"].shape == (20, 4, 16)
    assert not dist.is_initialized()


def test_what_cannot_be_shared_out_is_refused(alone):
    ranks, backend = ContextParallel(1, 0, 4), make_backend()
    over = over_ranks(backend, ranks)
    for features, said in (
        ({"sliding_window": 3}, r"^sliding_window: not with context parallelism"),
        ({"alibi_slopes": [0.5] * 4}, r"^alibi_slopes: not with context parallelism"),
        ({"attn_type": "encoder_only"}, r"^attn_type: encoder_only found; ranks share out the keys of decoder layers"),
    ):
        with pytest.raises(ValueError, match=said):
            over.impl("layer", scale=0.3, **features)
    with pytest.raises(ValueError, match=r"^ranks: blocks of 8 tokens on each rank, but the backend's are of 4"):
        over_ranks(backend, ContextParallel(1, 0, 8))
    with pytest.raises(ValueError, match=r"^ranks: rank 1 of 2 given; this is rank 0 of 1 in its group"):
        over_ranks(backend, ContextParallel(2, 1, 4))
    with pytest.raises(TypeError, match=r"^ranks: 2 is not a ContextParallel"):
        over_ranks(backend, 2)
    with pytest.raises(TypeError, match=r"^backend: "):
        over_ranks(select, ranks)


def test_a_backend_without_log_sum_exp_is_refused(alone, monkeypatch):
    backend = select(num_heads=4, num_kv_heads=2, head_size=8, dtype="float32", block_size=4).create()
    spec = type("Spec", (), {"features": frozenset(), "unsupported": {"lse": "it keeps none"}})
    monkeypatch.setattr(type(backend), "spec", spec)
    with pytest.raises(ValueError, match=r"^backend: reference returns no log-sum-exp, .*: it keeps none"):
        over_ranks(backend, ContextParallel(1, 0, 4))


def test_ranks_need_torch_distributed():
    with pytest.raises(RuntimeError, match=r"^group: torch\.distributed does not run"):
        over_ranks(make_backend(), ContextParallel(1, 0, 4))


def test_captured_steps_run_as_they_are(alone):
    """Rows of one token are the builder's own arrays, at the addresses of the capture; rows of several are refused."""
    ranks = ContextParallel(1, 0, 4)
    backend = over_ranks(make_backend(), ranks)
    batch = InputBatch(max_num_reqs=2, max_model_len=32, block_size=4)
    builder = MetadataBuilder(batch, backend, max_num_batched_tokens=16, context_parallel=ranks, decode_threshold=2)
    captured = builder.capture(2)
    assert backend.rows(captured) is captured
    drafts = builder.capture(1, query_len=2)
    with pytest.raises(ValueError, match=r"^metadata: captured rows of 2 tokens; under context parallelism capture"):
        backend.rows(drafts)


@pytest.mark.parametrize(
    ("output", "error", "message"),
    [
        (
            torch.zeros(2, 4, 8),
            ValueError,
            r"torch.float32 of shape \(2, 4, 8\) on cpu found; give torch.float32 of shape",
        ),
        (torch.zeros(4, 4, 8), ValueError, r"torch.float32 of shape \(4, 4, 8\)"),
        (torch.zeros(1, 3, 4, 8), ValueError, r"torch.float32 of shape \(1, 3, 4, 8\)"),
        (torch.zeros(3, 4, 8, dtype=torch.float16), ValueError, "torch.float16"),
        (torch.zeros(3, 4, 8, device="meta"), ValueError, "torch.float32 .* on meta"),
        (torch.zeros(3, 4, 16)[..., ::2], ValueError, r"strides \(64, 16, 2\)"),
        (torch.zeros(1, 4, 8).expand(3, 4, 8), ValueError, r"strides \(0, 8, 1\)"),
        ([0.0], TypeError, "list found"),
    ],
)
@pytest.mark.parametrize("splits", [False, True])
def test_an_output_that_the_parts_do_not_fit_is_refused_before_anything_is_written(
    alone, splits, output, error, message
):
    """The kernel that merges writes by its address, as many rows as the query has."""
    ranks, features = ContextParallel(1, 0, 4), {"lse", "encoder_decoder"} if splits else {"lse"}
    choice = select(
        num_heads=4, num_kv_heads=2, head_size=8, dtype="float32", block_size=4, backend="reference", features=features
    )
    backend = over_ranks(choice.create("cpu"), ranks)
    batch = InputBatch(max_num_reqs=1, max_model_len=16, block_size=4)
    builder = MetadataBuilder(batch, backend, max_num_batched_tokens=16, context_parallel=ranks)
    batch.add_request("a", [1, 2], 2)
    cache, tensors = backend.allocate_kv_cache(3), [torch.randn(3, heads, 8) for heads in (4, 2, 2)]
    with pytest.raises(error, match=f"^output: {message}"):
        backend.impl("layer", scale=0.3).forward(*tensors, cache, builder.build({"a": 3}), output)
    assert not cache.any()


def test_a_row_without_tokens_may_come_last(alone):
    """A step of an engine, or of fields that arrived, may have one."""
    choice = select(
        num_heads=4, num_kv_heads=2, head_size=8, dtype="float32", block_size=4, backend="reference",
        features={"lse", "encoder_decoder"},
    )  # fmt: skip
    inner = choice.create("cpu")
    batch = InputBatch(max_num_reqs=2, max_model_len=16, block_size=4)
    batch.add_request("a", [1, 2], 2)
    fields = MetadataBuilder(batch, max_num_batched_tokens=16).build({"a": 3}).asdict_zerocopy()
    fields |= {"num_reqs": 2, "num_prefills": 2, "query_start_loc": np.array([0, 3, 3], np.int32)}
    for name, last in (("query_lens", 0), ("seq_lens", 0), ("context_lens", 0), ("logits_indices", 2)):
        fields[name] = np.append(fields[name], np.int32(last))
    for name in ("seq_start_loc", "paged_kv_indptr"):
        fields[name] = np.append(fields[name], fields[name][-1])
    fields["paged_kv_last_page_len"] = np.append(fields["paged_kv_last_page_len"], np.int32(0))
    fields["block_table"] = np.pad(fields["block_table"], ((0, 1), (0, 0)))
    tensors, found = [torch.randn(3, heads, 8) for heads in (4, 2, 2)], []
    for backend in (inner, over_ranks(inner, ContextParallel(1, 0, 4))):
        cache = backend.allocate_kv_cache(3).normal_(generator=torch.Generator().manual_seed(0))
        metadata = metadata_from_fields(fields, inner)
        found.append(backend.impl("layer", scale=0.3).forward(*tensors, cache, metadata))
    torch.testing.assert_close(*found)


def test_a_profiling_run_asks_no_other_rank(alone, monkeypatch):
    ranks = ContextParallel(1, 0, 4)
    backend = over_ranks(make_backend(), ranks)
    builder = MetadataBuilder(
        InputBatch(max_num_reqs=2, max_model_len=32, block_size=4), backend, max_num_batched_tokens=16,
        context_parallel=ranks,
    )  # fmt: skip
    metadata, tensors = builder.build_profile([3, 5]), [torch.randn(8, heads, 8) for heads in (4, 2, 2)]
    monkeypatch.delattr("attncore.ranks.exchange._all_gather")
    inner = make_backend()
    expected, lse = inner.impl("layer", scale=0.3).forward_with_lse(*tensors, None, metadata)
    impl, cache = backend.impl("layer", scale=0.3), inner.allocate_kv_cache(3)
    for kv_cache in (None, cache):  # one that is given is not written
        torch.testing.assert_close(impl.forward(*tensors, kv_cache, metadata), expected)
        torch.testing.assert_close(impl.forward_with_lse(*tensors, kv_cache, metadata), (expected, lse))
    assert not cache.any()


def test_scales_and_blocks_are_those_of_the_backend(alone):
    inner = make_backend()
    backend = over_ranks(inner, ContextParallel(1, 0, 4))
    cache = backend.allocate_kv_cache(3)
    cache[:, 1] = 5
    backend.copy_blocks([cache], [(1, 2)])
    assert (cache[:, 2] == 5).all()
    backend.swap_blocks(cache, cache, [(0, 1)])
    assert not cache[:, 1].any()
    layer = backend.impl("layer", scale=0.3, sinks=[0.0] * inner.config.num_heads)
    layer.set_scales(1.0, 1.0)
    layer.set_sinks([2.0] * inner.config.num_heads)
    assert layer._mine.sinks.tolist() == [2.0] * inner.config.num_heads
    assert backend.plan_keys == inner.plan_keys != ()
    backend.forget_layers()
    assert inner.plan_keys == ()
