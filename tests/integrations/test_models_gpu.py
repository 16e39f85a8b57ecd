"""On a CUDA device, in bfloat16: logits over paged caches are as right as those of transformers' own attention."""

import gc

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers", reason="transformers is not installed")

from engine import Engine  # noqa: E402
from integrations.models import DECODERS, decoder  # noqa: E402

from attncore import NoBackendError  # noqa: E402
from attncore.integrations.transformers import attncore_context, select_for_model  # noqa: E402

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
    pytest.mark.filterwarnings("ignore:.*deprecated:DeprecationWarning"),  # of FlashAttention 4 while it compiles
    pytest.mark.filterwarnings("ignore:Argument aux_data:UserWarning"),
]
SHAPE = {"head_dim": 128, "hidden_size": 256, "num_hidden_layers": 3}
LENGTHS = (1, 17, 60, 200)


def logits_alone(model, prompts, implementation):
    model.set_attn_implementation(implementation)
    with torch.inference_mode():
        return torch.cat(
            [
                model(input_ids=torch.tensor([ids], device=model.device), use_cache=False).logits[0, -1:]
                for ids in prompts
            ]
        ).float()


def logits_of_an_engine(model, prompts, backend):
    """Of the last token of each prompt: most of it computed before, in chunks, the last token as a decode."""
    engine = Engine(
        model,
        num_blocks=64,
        max_num_reqs=8,
        block_size=256 if backend == "flash" else 16,
        backend=backend,
        graph_sizes=(),
    )
    for row, ids in enumerate(prompts):
        blocks = engine.pool.take(-(-len(ids) // engine.block_size))
        request = engine.add_request(ids, 1)
        engine.running[row] = request
        engine.batch.add_request(row, blocks)
        engine.input_ids.give(row, ids)
    seen = []

    def forward(metadata):
        with torch.inference_mode(), attncore_context(metadata, engine.caches):
            ids = metadata.input_ids[None]
            logits = model(ids, position_ids=metadata.positions[None], use_cache=False).logits[0]
        seen.append((metadata.req_ids, logits[metadata.logits_indices.long()].float()))

    for part in (lambda n: n // 2, lambda n: n - 1 - n // 2, lambda n: 1):
        scheduled = {row: part(len(ids)) for row, ids in enumerate(prompts)}
        if any(scheduled.values()):
            forward(engine.builder.build(scheduled))
    names, logits = seen[-1]
    return logits[torch.tensor([names.index(row) for row in range(len(prompts))], device=logits.device)]


@pytest.mark.parametrize("backend", ["flashinfer", "flash", "reference"])
@pytest.mark.parametrize("name", DECODERS)
def test_logits_are_as_right_as_those_of_eager_and_sdpa(name, backend):
    shape = {**SHAPE, **({"query_pre_attn_scalar": 128} if name == "gemma2" else {})}
    model = decoder(name, **shape).cuda()
    prompts = [
        torch.randint(3, 128, (length,), generator=torch.Generator().manual_seed(1)).tolist() for length in LENGTHS
    ]
    exact = logits_alone(model, prompts, "eager")
    model = model.bfloat16()
    try:
        select_for_model(model, backend=backend, block_size=256 if backend == "flash" else 16)
    except NoBackendError as error:
        pytest.skip(f"{backend} does not run {name} here: {str(error).splitlines()[0]}")
    others = [logits_alone(model, prompts, "eager")]
    if name not in ("gpt_oss", "gemma2"):  # sdpa has neither sinks nor a soft cap
        others.append(logits_alone(model, prompts, "sdpa"))
    found = logits_of_an_engine(model, prompts, backend)

    def error(logits):
        return float(((logits - exact) ** 2).mean().sqrt() / (exact**2).mean().sqrt())

    assert error(found) < 1.3 * max(map(error, others)) + 1e-3


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("backend", ["flashinfer", "flash"])
def test_an_engine_in_graphs_says_what_it_says_without(backend, late):
    """However many steps are launched ahead, by either transport, and where the device is far behind the host."""
    model = decoder("llama", **SHAPE).cuda().bfloat16()
    if late:
        model.register_forward_pre_hook(lambda *_: torch.cuda._sleep(3_000_000))
    try:
        select_for_model(model, backend=backend, cuda_graph="uniform_decode")
    except NoBackendError as error:
        pytest.skip(f"{backend} does not run here: {str(error).splitlines()[0]}")
    prompts = [[7] * length for length in (3, 40, 90)] + [list(range(5, 60))]
    expected = None
    for steps, transport in ((0, "graph"), (1, "graph"), (8, "graph"), (8, "copy")):
        options = {"num_blocks": 64, "max_num_reqs": 8, "backend": backend, "transport": transport, "ahead": steps}
        engine = Engine(model, graph_sizes=(1, 2, 4, 8), **options)
        assert engine.ahead == steps
        found = engine.complete(prompts, 24)
        if expected is None:
            expected = found
            assert found == Engine(model, graph_sizes=(), **options).complete(prompts, 24)
            alone = Engine(model, graph_sizes=(1,), **options).complete([prompts[3][::-1]], 40)[0]
        assert found == expected, (steps, transport)
        # Alone: beside others, whose number differs while a stop token is not read yet, bfloat16 rounds otherwise.
        said = engine.complete([prompts[3][::-1]], 40, stop=(alone[13],))
        assert said == [alone[: alone.index(alone[13]) + 1]], (steps, transport)
        assert engine.pool.num_free == 63
        engine.close()


@pytest.mark.parametrize("backend", ["rocm", "flash", "flashinfer"])
def test_captured_decodes_attend_by_sinks_that_were_loaded_later(backend):
    """In place: of a graph over other tensors nobody can say which it reads."""
    model, other = (decoder("gpt_oss", seed=seed, **SHAPE).cuda().bfloat16() for seed in range(2))
    try:
        select_for_model(model, backend=backend, cuda_graph="uniform_decode")
    except NoBackendError as error:
        pytest.skip(f"{backend} does not run gpt_oss here: {str(error).splitlines()[0]}")
    other.load_state_dict(model.state_dict())
    for layer in other.model.layers:
        layer.self_attn.sinks.data.fill_(4.0)
    options = {"num_blocks": 64, "max_num_reqs": 8, "backend": backend, "graph_sizes": (1, 2, 4)}
    engine = Engine(model, **options)
    before = engine.complete([[7] * 40, [5] * 20], 24)
    for mine, new in zip(model.parameters(), other.parameters(), strict=True):
        mine.data.copy_(new)  # as loaders of weights do
    engine.pool = type(engine.pool)(engine.num_blocks)  # no block is of the weights before
    found = engine.complete([[7] * 40, [5] * 20], 24)
    assert found == Engine(other, **options).complete([[7] * 40, [5] * 20], 24) != before


def test_close_gives_the_memory_of_graphs_and_caches_back():
    model = decoder("llama", **SHAPE).cuda().bfloat16()
    try:
        select_for_model(model, cuda_graph="uniform_decode")
    except NoBackendError as error:
        pytest.skip(f"no backend can be captured here: {str(error).splitlines()[0]}")
    engine = Engine(model, num_blocks=2048, max_num_reqs=8)
    engine.complete([[7] * 40], 4)
    nbytes = sum(cache.nbytes for cache in engine.caches.values() if isinstance(cache, torch.Tensor))
    held = torch.cuda.memory_allocated()
    engine.close()
    assert engine.graphs == {}
    gc.collect()
    assert torch.cuda.memory_allocated() <= held - nbytes
