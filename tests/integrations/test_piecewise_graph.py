"""capture_between_attention: steps of any kind in one capture, whose attention runs eagerly over each step's metadata.

On a CPU a replay runs the model again; what graphs hold is tested by stand-ins here, and on a GPU in
test_models_gpu.py.
"""

from contextlib import nullcontext

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers", reason="transformers is not installed")

from engine import Engine  # noqa: E402
from integrations.models import decoder  # noqa: E402

from attncore import NoBackendError  # noqa: E402
from attncore.errors import CaptureError  # noqa: E402
from attncore.graphs import StandInGraph, capturing  # noqa: E402
from attncore.integrations.transformers import (  # noqa: E402
    attncore_context,
    capture_between_attention,
    compile_layers,
    piecewise_graph,
    select_for_model,
)

PROMPTS = [list(range(3, 3 + length)) for length in (1, 5, 40, 20)]
POOL = {"num_blocks": 64, "max_num_reqs": 4, "max_num_batched_tokens": 32, "block_size": 8}


@pytest.fixture(scope="module")
def model():
    return decoder("llama")


def counted(replay, ran, size=0):
    """``replay``, which notes its steps: the tokens of the capture and its own."""

    def noted(metadata):
        ran.append((size, metadata.num_tokens))
        return replay(metadata)

    return noted


def engine_of(model, **options):
    return Engine(model, **POOL, **options)


@pytest.mark.parametrize("name", ["llama", "gemma2", "mixtral"])
def test_steps_of_many_kinds_say_the_same(name):
    model = decoder(name)
    expected = engine_of(model).complete(PROMPTS, 6)
    engine = engine_of(model, mixed_sizes=(8, 16, 64))
    assert [mixed.graph.num_tokens for mixed in engine.mixed] == [32, 16, 8]
    ran = []
    for mixed in engine.mixed:
        mixed.graph.replay = counted(mixed.graph.replay, ran, mixed.graph.num_tokens)
    assert engine.complete(PROMPTS, 6) == expected
    engine.complete([[5] * 12], 1)
    assert {size for size, _ in ran} == {32, 16, 8}
    assert all(size == min(one for one in (8, 16, 32) if one >= found) for size, found in ran)


def captured(engine, tokens=8, run=None):
    ids = torch.zeros((1, tokens), dtype=torch.int64)
    return capture_between_attention(
        run or (lambda: engine.model(input_ids=ids, use_cache=False).logits), engine.caches
    )


def step(engine, tokens):
    blocks = list(range(1, 1 - (-tokens // 8)))
    engine.batch.add_request("a", blocks)
    engine.input_ids.give("a", list(range(tokens)))
    return engine.builder.build({"a": tokens})


def test_a_longer_step_is_refused(model):
    engine = engine_of(model)
    graph = captured(engine)
    with pytest.raises(CaptureError, match="the step has 9 tokens, the capture 8; capture one of more"):
        graph.replay(step(engine, 9))


def test_a_run_that_returns_no_tensor_or_attends_nowhere_is_refused(model):
    engine = engine_of(model)
    ids = torch.zeros((1, 8), dtype=torch.int64)
    with pytest.raises(TypeError, match="run: it returned CausalLMOutputWithPast; return one tensor"):
        captured(engine, run=lambda: model(input_ids=ids, use_cache=False))
    with pytest.raises(ValueError, match="run: no layer of kv_caches attended"):
        captured(engine, run=lambda: ids + 1)


@pytest.mark.parametrize("caches", [None, {}], ids=["none", "a mapping"])
def test_caches_of_another_kind_are_refused(model, caches):
    for call in (
        lambda: attncore_context(None, caches),
        lambda: capture_between_attention(lambda: None, caches),
        lambda: compile_layers(model, caches),
    ):
        with pytest.raises(TypeError, match=rf"^kv_caches: a {type(caches).__name__} found; give what paged_caches"):
            call()


def test_what_is_no_function_and_what_is_no_step_is_said(model):
    engine = engine_of(model)
    with pytest.raises(TypeError, match=r"^run: NoneType found; give a function without arguments that runs the model"):
        capture_between_attention(None, engine.caches)
    graph, metadata = captured(engine), step(engine, 3)
    with (
        attncore_context(metadata, engine.caches),
        pytest.raises(CaptureError, match=r"^capture_between_attention: inside a context of a step; capture outside"),
    ):
        captured(engine)
    first, second = engine.caches
    for given, what in ((None, "NoneType"), (3, "int"), ({first: metadata, second: 3}, "int")):
        with pytest.raises(TypeError, match=f"^metadata: {what} found; give a step's metadata, or a mapping of layer"):
            graph.replay(given)
    for given, lacks in (({}, first), ({first: metadata}, second)):
        with pytest.raises(ValueError, match=f"^metadata: a mapping without layer {lacks}; give each layer"):
            graph.replay(given)
    assert torch.equal(graph.replay({first: metadata, second: metadata}), graph.replay(metadata))


def test_nothing_is_replayed_after_a_reset(model):
    engine = engine_of(model)
    graph = captured(engine)
    graph.reset()
    with pytest.raises(CaptureError, match="this graph was reset"):
        graph.replay(step(engine, 3))


def test_a_capture_inside_another_is_refused(model):
    engine = engine_of(model)
    graph, metadata = captured(engine), step(engine, 3)
    with pytest.raises(CaptureError, match="end that capture first"), capturing(StandInGraph()):
        captured(engine)
    with pytest.raises(CaptureError, match="end that capture first"), capturing(StandInGraph()):
        graph.replay(metadata)


class Recorded:
    """A CUDA graph's calls, in order with those of all others."""

    calls: list = []  # noqa: RUF012

    def __init__(self):
        self.number = sum(what == "begin" for what, _ in self.calls)

    def capture_begin(self, pool):
        self.calls.append(("begin", pool))

    def capture_end(self):
        self.calls.append(("end", self.number))

    def replay(self):
        self.calls.append(("replay", self.number))


@pytest.fixture
def stand_ins(monkeypatch):
    class Stream:
        def wait_stream(self, other):
            pass

    monkeypatch.setattr(Recorded, "calls", [])
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Recorded)
    for name, function in {
        "Stream": Stream, "current_stream": Stream, "stream": lambda _: nullcontext(), "synchronize": lambda: None
    }.items():  # fmt: skip
        monkeypatch.setattr(torch.cuda, name, function)
    return Recorded.calls


def captured_by_stand_ins(engine, run, pool="pool"):
    graph = piecewise_graph.PiecewiseGraph(run, engine.caches, pool)
    graph._capture()
    return graph


def test_graphs_and_attention_take_turns(model, stand_ins, monkeypatch):
    engine = engine_of(model)
    ids = torch.zeros((1, 8), dtype=torch.int64)
    graph = captured_by_stand_ins(engine, lambda: engine.model(input_ids=ids, use_cache=False).logits)
    layers = list(engine.caches)
    captures = [turn for number in range(len(layers) + 1) for turn in (("begin", "pool"), ("end", number))]
    assert stand_ins == captures
    for name, impl in engine.caches.impls.items():
        monkeypatch.setattr(impl, "forward", lambda *given, name=name: stand_ins.append((name, len(given))))
    stand_ins.clear()
    assert graph.replay(step(engine, 5)) is graph.output
    turns = [turn for number, name in enumerate(layers) for turn in (("replay", number), (name, 6))]
    assert stand_ins == [*turns, ("replay", len(layers))]


def test_what_cannot_be_captured_is_named_and_leaves_no_capture_open(model, stand_ins):
    engine = engine_of(model)
    ids, runs = torch.zeros((1, 8), dtype=torch.int64), []

    def run():
        logits = engine.model(input_ids=ids, use_cache=False).logits
        runs.append(logits)
        if len(runs) > 1:
            raise RuntimeError("operation not permitted when stream is capturing\nmore of it")
        return logits

    with pytest.raises(CaptureError, match=r"run: cannot be captured between its attention: .*operation not permitted"):
        captured_by_stand_ins(engine, run)
    assert [what for what, _ in stand_ins].count("begin") == [what for what, _ in stand_ins].count("end")


@pytest.mark.filterwarnings("ignore:.*deprecated:DeprecationWarning")  # of torch's compiler
@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("backend", ["flashinfer", "flash"])
def test_logits_on_a_gpu_are_as_right_as_those_of_eager_steps(backend):
    """Compared with float32: of steps in pieces, of compiled layers, and of both."""
    model = decoder("llama", head_dim=128, hidden_size=256, num_hidden_layers=3, max_position_embeddings=512).cuda()
    generator = torch.Generator().manual_seed(1)
    prompts = [torch.randint(3, 128, (length,), generator=generator).tolist() for length in (1, 17, 60, 200, 333)]
    model.set_attn_implementation("eager")
    with torch.inference_mode():
        exact = {tuple(ids): model(input_ids=torch.tensor([ids]).cuda()).logits[0, -1].clone() for ids in prompts}
    model = model.bfloat16()
    size = 256 if backend == "flash" else 16
    try:
        select_for_model(model, backend=backend, block_size=size)
    except NoBackendError as error:
        pytest.skip(f"{backend} does not run here: {str(error).splitlines()[0]}")
    errors = []
    for compiled, sizes in ((False, ()), (False, (64, 128, 256)), (True, ()), (True, (64, 128, 256))):
        engine = Engine(
            model, num_blocks=128, max_num_reqs=8, max_num_batched_tokens=256, block_size=size, backend=backend,
            graph_sizes=(), mixed_sizes=sizes, compile=compiled,
        )  # fmt: skip
        if engine.whole:
            engine.close()
            pytest.skip(f"{backend} captures such steps whole here, and none in pieces")
        replays = []
        for mixed in engine.mixed:
            mixed.graph.replay = counted(mixed.graph.replay, replays)
        seen = logits_behind_prompts(engine)
        engine.complete(prompts, 3)
        assert bool(replays) == bool(sizes)
        assert seen.keys() == exact.keys()
        found, right = (torch.stack([of[ids] for ids in exact]).float() for of in (seen, exact))
        errors.append(float((found - right).square().mean().sqrt() / right.square().mean().sqrt()))
        engine.close()
    assert max(errors) < 1.3 * errors[0] + 1e-3, errors


def logits_behind_prompts(engine):
    """Of the last token of each prompt, when the engine has run."""
    seen, sample = {}, engine._sample

    def seeing(logits, metadata):
        for row, name in enumerate(metadata.req_ids):
            request = engine.running[name]
            if int(metadata.host.seq_lens[row]) == request.num_prompt:
                seen[tuple(request.tokens[: request.num_prompt])] = logits[row].clone()
        return sample(logits, metadata)

    engine._sample = seeing
    return seen
