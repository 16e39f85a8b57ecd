"""Steps with prefills of examples/engine.py in graphs of whole steps, over a backend whose level is ``always``."""

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers", reason="transformers is not installed")

from engine import Engine  # noqa: E402
from integrations.captured_engine import graphs_on_cpu  # noqa: E402
from integrations.hybrids import hybrid  # noqa: E402
from integrations.models import decoder  # noqa: E402
from worker import default_mixed_sizes  # noqa: E402

PROMPTS = [list(range(3, 3 + length)) for length in (1, 5, 40, 20, 13, 2)]
POOL = {"num_blocks": 64, "max_num_reqs": 4, "max_num_batched_tokens": 32, "block_size": 8}
SIZES = (8, 16, 64)


@pytest.mark.parametrize(
    ("name", "transport", "options"),
    [
        ("llama", "auto", {}),
        ("llama", "copy", {}),
        ("llama", "graph", {}),
        ("gemma2", "graph", {}),
        ("llama", "graph", {"compile": {"backend": "eager"}}),
    ],
)
def test_every_step_is_captured_and_says_the_same(name, transport, options, monkeypatch):
    model = decoder(name)
    expected = Engine(model, **POOL).complete(PROMPTS, 6)
    with graphs_on_cpu(transport, monkeypatch, "always") as given:
        engine = Engine(model, **POOL, **given, mixed_sizes=SIZES, **options)
        assert engine.builder.captured == (1, 2, 4, (4, 8), (4, 16), (4, 32))
        assert not engine.mixed
        sizes, run_steps = [], engine._run_steps

        def noted(others, size, num_steps):
            sizes.append(size)
            return run_steps(others, size, num_steps)

        monkeypatch.setattr(engine, "_run_steps", noted)
        assert engine.complete(PROMPTS, 6) == expected
        assert engine.complete([PROMPTS[2], *PROMPTS[:2]], 3) == [tokens[:3] for tokens in (expected[2], *expected[:2])]
        engine.close()
        assert engine.builder.captured == ()
    assert None not in sizes
    assert {(4, 8), (4, 32), 4} <= set(sizes)


def test_a_step_takes_the_smallest_size_that_holds_it(monkeypatch):
    with graphs_on_cpu("auto", monkeypatch, "always") as given:
        engine = Engine(decoder("llama"), **POOL, **given, mixed_sizes=SIZES)
    assert [engine._size_of(*step) for step in ((2, 2), (4, 4), (2, 3), (4, 9), (3, 32))] == [
        2, 4, (4, 8), (4, 16), (4, 32),
    ]  # fmt: skip
    assert engine._size_of(5, 5) is None
    assert engine._size_of(4, 33) is None


@pytest.mark.parametrize("transport", ["copy", "graph"])
def test_a_size_of_as_many_tokens_as_rows(transport, monkeypatch):
    """As on a GPU, where 64 requests and 64 tokens are both among the sizes that are chosen."""
    model, prompts = decoder("llama"), [[20, 26], [1, 2, 3], [7], [5, 6]]
    expected = Engine(model, **POOL).complete(prompts, 5)
    with graphs_on_cpu(transport, monkeypatch, "always") as given:
        engine = Engine(model, **{**POOL, "max_num_reqs": 8}, **given, mixed_sizes=(8,))
        assert (8, 8) in engine.builder.captured
        assert engine.complete(prompts, 5) == expected
        engine.close()


def test_models_with_states_capture_decodes_alone(monkeypatch):
    with graphs_on_cpu("auto", monkeypatch, "always") as given:
        with pytest.raises(ValueError, match="num_tokens: 8, but group 'states' holds states"):
            Engine(hybrid("FalconH1"), **POOL, **given, mixed_sizes=(8,))


def test_a_model_that_cannot_be_captured_runs_eagerly(monkeypatch, caplog):
    """Where the engine has chosen the sizes itself, it says why; sizes that were asked for are an error."""
    model = decoder("llama")
    with graphs_on_cpu("copy", monkeypatch, "always") as given:
        engine = Engine(model, **POOL, **{**given, "graph_sizes": ()})
        expected = engine.complete(PROMPTS, 4)
        run = engine._run

        def fails(metadata):
            if metadata.use_cuda_graph:
                raise RuntimeError("copies from the host")
            run(metadata)

        monkeypatch.setattr(engine, "_run", fails)
        engine._capture_decodes({4, 2}, chosen=True)
        assert "LlamaForCausalLM runs without graphs: copies from the host" in caplog.text
        for capture in (lambda: engine._capture_decodes({4}, chosen=False), lambda: engine._capture_mixed((16,))):
            with pytest.raises(RuntimeError, match="copies from the host"):
                capture()
        assert (engine.graphs, engine.whole, engine.builder.captured) == ({}, {}, ())
        assert engine.complete(PROMPTS, 4) == expected
        engine.close()


def test_the_sizes_that_an_engine_chooses():
    assert default_mixed_sizes(2048) == (64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048)
    assert default_mixed_sizes(100) == (64, 96, 100)
    assert default_mixed_sizes(64) == (64,)
    assert default_mixed_sizes(7) == (7,)
