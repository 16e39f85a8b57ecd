"""A group's layers and builder by themselves: KV sharing, graph levels, drafts, what is refused when they are made."""

from types import SimpleNamespace

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed here; make test-engines has an environment with it")

import torch
from integrations.vllm import cpu_engine  # noqa: F401  it sets the environment up
from vllm.v1.attention.backend import AttentionCGSupport, CommonAttentionMetadata

from attncore.integrations.vllm import attention_backend, metadata_builder
from attncore.integrations.vllm.layer import AttncoreImpl
from attncore.integrations.vllm.metadata_builder import GRAPH_LEVELS, AttncoreMetadataBuilder
from attncore.vocabulary import GRAPH_LEVELS as LEVELS

HEADS, KV_HEADS, SIZE, BLOCK = 4, 2, 16, 16


class OfReference(AttncoreMetadataBuilder):
    attncore_name = "reference"


def configuration(layers, **over):
    """As much of vLLM's configuration as a builder reads."""
    context = {
        name: SimpleNamespace(impl=impl, _k_scale_float=1.0, _v_scale_float=1.0) for name, impl in layers.items()
    }
    parts = {
        "model_config": SimpleNamespace(dtype=torch.float32, max_model_len=64),
        "parallel_config": SimpleNamespace(decode_context_parallel_size=1),
        "scheduler_config": SimpleNamespace(max_num_seqs=4, max_num_batched_tokens=32, async_scheduling=False),
        "cache_config": SimpleNamespace(num_gpu_blocks=8, block_size=BLOCK),
        "compilation_config": SimpleNamespace(static_forward_context=context, max_cudagraph_capture_size=0),
        "speculative_config": None,
        "additional_config": {},
    }
    return SimpleNamespace(**parts | over)


def builder_of(layers, kind=OfReference, **over):
    config = configuration(layers, **over)
    spec = SimpleNamespace(block_size=BLOCK, head_size=next(iter(layers.values())).head_size)
    return kind(spec, list(layers), config, torch.device("cpu"))


def step(lengths, tokens, **over):
    """Rows of so many keys and tokens; row i has block i + 1, and two rows of padding follow."""
    rows = len(lengths) + 2
    starts = torch.zeros(rows + 1, dtype=torch.int32)
    starts[1 : len(tokens) + 1] = torch.tensor(tokens).cumsum(0)
    starts[len(tokens) + 1 :] = starts[len(tokens)]
    slots = [(i + 1) * BLOCK + key for i, count in enumerate(tokens) for key in range(lengths[i] - count, lengths[i])]
    facts = {
        "query_start_loc": starts, "query_start_loc_cpu": starts.clone(), "num_reqs": rows,
        "seq_lens": torch.tensor([*lengths, 0, 0], dtype=torch.int32), "num_actual_tokens": len(slots) + 2,
        "max_query_len": max(tokens), "max_seq_len": max(lengths),
        "block_table_tensor": torch.arange(1, rows + 1, dtype=torch.int32)[:, None].repeat(1, 4),
        "slot_mapping": torch.tensor([*slots, -1, -1]),
    }  # fmt: skip
    return CommonAttentionMetadata(**facts | over)


def cache():
    return torch.zeros(8, KV_HEADS, BLOCK, 2 * SIZE)


def run(impl, metadata, kv_cache, seed=0):
    generator = torch.Generator().manual_seed(seed)
    query = torch.randn(metadata.slot_mapping.shape[0] + 2, HEADS, SIZE, generator=generator)
    key, value = (torch.randn(len(query), KV_HEADS, SIZE, generator=generator) for _ in range(2))
    output = torch.full_like(query, 7.0)
    return impl.forward(None, query, key, value, kv_cache, metadata, output)


def test_a_layer_that_shares_a_cache_reads_and_does_not_write():
    layers = {
        "first": AttncoreImpl(HEADS, SIZE, 0.25, KV_HEADS),
        "second": AttncoreImpl(HEADS, SIZE, 0.25, KV_HEADS, kv_sharing_target_layer_name="first"),
    }
    metadata = builder_of(layers).build(0, step([5, 9], [1, 3]))
    shared = cache()
    first = run(layers["first"], metadata, shared)
    kept = shared.clone()
    again = run(layers["second"], metadata, shared, seed=0)
    torch.testing.assert_close(again[:4], first[:4])
    run(layers["second"], metadata, shared, seed=1)
    assert torch.equal(shared, kept)
    run(layers["first"], metadata, shared, seed=1)
    assert not torch.equal(shared, kept)


def test_each_step_has_the_sinks_that_are_in_the_parameter():
    """Weights are updated in place, and a captured graph runs no layer's Python: the builder copies them."""
    sinks = torch.nn.Parameter(torch.zeros(HEADS, dtype=torch.bfloat16), requires_grad=False)
    layers = {"one": AttncoreImpl(HEADS, SIZE, 0.25, KV_HEADS, sinks=sinks)}
    builder = builder_of(layers)
    before = run(layers["one"], builder.build(0, step([5, 9], [1, 3])), cache())
    sinks.data.fill_(2.0)
    found = run(layers["one"], builder.build(0, step([5, 9], [1, 3])), cache())
    made_later = {"one": AttncoreImpl(HEADS, SIZE, 0.25, KV_HEADS, sinks=sinks)}
    expected = run(made_later["one"], builder_of(made_later).build(0, step([5, 9], [1, 3])), cache())
    assert torch.equal(found[:4], expected[:4])
    assert not torch.equal(found[:4], before[:4])


def test_keys_that_are_in_the_cache_already_may_be_left_out():
    layers = {"one": AttncoreImpl(HEADS, SIZE, 0.25, KV_HEADS)}
    metadata = builder_of(layers).build(0, step([5, 9], [1, 3]))
    kv_cache = cache()
    first = run(layers["one"], metadata, kv_cache)
    query = torch.randn(6, HEADS, SIZE, generator=torch.Generator().manual_seed(0))
    output = layers["one"].forward(None, query, None, None, kv_cache, metadata, torch.empty_like(query))
    torch.testing.assert_close(output[:4], first[:4])


def test_a_cache_that_is_given_other_memory():
    """The same tensor, as vLLM may hold it beyond what its memory was."""
    layers = {"one": AttncoreImpl(HEADS, SIZE, 0.25, KV_HEADS)}
    builder, kv_cache = builder_of(layers), cache()
    run(layers["one"], builder.build(0, step([5, 9], [1, 3])), kv_cache)
    kv_cache.data = cache()
    run(layers["one"], builder.build(0, step([5, 9], [1, 3])), kv_cache)
    assert (kv_cache != 0).any(-1).any(1).nonzero().tolist() == [[1, 4], [2, 6], [2, 7], [2, 8]]


def test_padding_writes_nothing_and_a_profiling_run_gives_zeros():
    layers = {"one": AttncoreImpl(HEADS, SIZE, 0.25, KV_HEADS)}
    metadata = builder_of(layers).build(0, step([5, 9], [1, 3]))
    kv_cache = cache()
    run(layers["one"], metadata, kv_cache)
    written = (kv_cache != 0).any(-1).any(1).nonzero().tolist()
    assert written == [[1, 4], [2, 6], [2, 7], [2, 8]]
    output = torch.ones(3, HEADS, SIZE)
    assert not layers["one"].forward(None, output, output, output, kv_cache, None, output.clone()).any()


def test_decodes_with_drafts_are_bounded_and_cut_to_the_models_length(monkeypatch):
    layers = {"one": AttncoreImpl(HEADS, SIZE, 0.25, KV_HEADS)}
    drafts = SimpleNamespace(method="eagle", num_speculative_tokens=2, parallel_drafting=False)
    with pytest.raises(ValueError, match=r"attncore: reference plans by exact lengths .* upper bounds"):
        builder_of(layers, speculative_config=drafts)
    monkeypatch.setattr(metadata_builder, "check_lengths", lambda choice, config: None)
    builder, found = builder_of(layers, speculative_config=drafts), []
    monkeypatch.setattr(builder.steps, "build", lambda **given: found.append(given))
    builder.build(0, step([5, 9], [1, 3], seq_lens_cpu_upper_bound=torch.tensor([5, 900, 0, 0], dtype=torch.int32)))
    assert found[0]["bounded"]
    assert found[0]["host_seq_lens"].tolist() == [5, 68, 0, 0]


def test_drafts_of_the_prompt_are_exact():
    layers = {"one": AttncoreImpl(HEADS, SIZE, 0.25, KV_HEADS)}
    drafts = SimpleNamespace(method="ngram", num_speculative_tokens=2, parallel_drafting=False)
    assert not builder_of(layers, speculative_config=drafts)._bounded
    ahead = SimpleNamespace(max_num_seqs=4, max_num_batched_tokens=32, async_scheduling=True)
    with pytest.raises(ValueError, match="upper bounds"):
        builder_of(layers, speculative_config=drafts, scheduler_config=ahead)


def test_each_level_of_graphs_has_one_of_vllm():
    assert GRAPH_LEVELS.keys() == LEVELS.keys()
    levels = [GRAPH_LEVELS[one].value for one in ("never", "uniform_decode", "uniform")]
    assert levels == [0, 1, 2]
    layers = {"one": AttncoreImpl(HEADS, SIZE, 0.25, KV_HEADS)}
    spec = SimpleNamespace(block_size=BLOCK, head_size=SIZE)
    assert OfReference.get_cudagraph_support(configuration(layers), spec) is AttentionCGSupport.NEVER


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"attn_type": "encoder_only"}, "the type encoder_only"),
        ({"kv_cache_dtype": "nvfp4"}, "kv_cache_dtype nvfp4"),
        ({"chunk_lookback": 3}, "gives its attention chunk_lookback"),
    ],
)
def test_layers_that_are_refused(arguments, words):
    with pytest.raises(ValueError, match=f"attncore: .*{words}"):
        AttncoreImpl(HEADS, SIZE, 0.25, KV_HEADS, **arguments)


class OfNarrow(AttncoreMetadataBuilder):
    attncore_name = "narrow"


@pytest.mark.parametrize(("field", "asked"), [("kv_cache_dtype", "fp8_e5m2"), ("logits_soft_cap", 20.0)])
def test_what_a_layer_asks_beyond_the_selector_is_refused_with_reasons(site, field, asked):
    site.plugin("narrow")  # floats alone, and no feature
    layers = {"one": AttncoreImpl(HEADS, 64, 0.25, KV_HEADS, **{field: asked})}
    with pytest.raises(ValueError, match=f"attncore: narrow: .*{field}"):
        builder_of(layers, OfNarrow)
    assert builder_of(layers)


def test_a_cache_of_more_blocks_than_the_kernel_reads_is_refused(site):
    site.plugin("narrow", extra="max_block_id=6, ")
    layers = {"one": AttncoreImpl(HEADS, 64, 0.25, KV_HEADS)}
    with pytest.raises(ValueError, match=r"attncore: narrow: num_blocks 8 not supported by .*; supported: at most 7"):
        builder_of(layers, OfNarrow)
    unknown = SimpleNamespace(num_gpu_blocks=None, block_size=BLOCK)  # vLLM's workers may not know it yet
    metadata = builder_of({"one": AttncoreImpl(HEADS, SIZE, 0.25, KV_HEADS)}, cache_config=unknown).build(
        0, step([5, 9], [1, 3])
    )
    layers["one"].bind("one", SimpleNamespace(impl=lambda *_, **__: SimpleNamespace(forward=None),
                                              spec=SimpleNamespace(max_block_id=6)), None)  # fmt: skip
    with pytest.raises(ValueError, match="attncore: the cache has 8 blocks, and the backend reads ids up to 6"):
        run(layers["one"], metadata, cache())


def test_chunked_local_attention_makes_more_rows_than_requests():
    """vLLM's own builder over ours, for the layers of Llama 4: one request's tokens lie in three chunks."""
    from vllm.model_executor.layers.attention import chunked_local_attention

    class Backend(attention_backend.AttncoreBackend):
        attncore_name = "reference"

    kind = chunked_local_attention.create_chunked_local_attention_backend(Backend, 16).get_builder_cls()
    layers = {"one": AttncoreImpl(HEADS, SIZE, 0.25, KV_HEADS)}
    config = configuration(layers)
    config.scheduler_config.max_num_seqs = 1
    spec = SimpleNamespace(block_size=BLOCK, head_size=SIZE, attention_chunk_size=16)
    builder = kind(spec, list(layers), config, torch.device("cpu"))
    tokens = torch.tensor([0, 24], dtype=torch.int32)
    metadata = builder.build(
        0,
        CommonAttentionMetadata(
            query_start_loc=tokens, query_start_loc_cpu=tokens, num_reqs=1, num_actual_tokens=24, max_query_len=24,
            max_seq_len=36, seq_lens=torch.tensor([36], dtype=torch.int32),
            block_table_tensor=torch.tensor([[3, 1, 2, 0]], dtype=torch.int32), slot_mapping=torch.arange(24),
        ),
    )  # fmt: skip
    assert metadata.host.seq_lens.tolist() == [16, 16, 4]
    assert metadata.host.query_lens.tolist() == [4, 16, 4]
    assert metadata.block_table[:, 0].tolist() == [3, 1, 2]


def test_attention_that_is_not_causal_and_quantised_output_are_refused():
    layers = {"one": AttncoreImpl(HEADS, SIZE, 0.25, KV_HEADS)}
    builder = builder_of(layers)
    with pytest.raises(ValueError, match="attncore: the attention is not causal"):
        builder.build(0, step([5, 9], [1, 3], causal=False))
    metadata, output = builder.build(0, step([5, 9], [1, 3])), torch.ones(6, HEADS, SIZE)
    with pytest.raises(ValueError, match="quantised output"):
        layers["one"].forward(None, output, output, output, cache(), metadata, output, output_scale=output)
