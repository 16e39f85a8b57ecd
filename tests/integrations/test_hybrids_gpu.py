"""Hybrid models of transformers on a GPU: states in slots, decodes in graphs, tokens as those of the model alone."""

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers", reason="transformers is not installed")

from engine import Engine  # noqa: E402
from integrations.hybrids import HYBRIDS, hybrid  # noqa: E402
from integrations.models import greedy  # noqa: E402
from integrations.test_recurrent_layers import FEW, dirty, prompts, run  # noqa: E402

from attncore import NoBackendError  # noqa: E402

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]


@pytest.mark.parametrize("captured", [False, True], ids=["eager", "graphs"])
@pytest.mark.parametrize("backend", ["rocm", "reference"])
@pytest.mark.parametrize("name", HYBRIDS)
def test_every_request_says_what_it_says_alone(name, backend, captured):
    """In float32, so that tokens are the same."""
    model = hybrid(name, "cuda")
    expected = [greedy(model, prompt, 12) for prompt in prompts()]
    sizes = None if captured else ()
    try:
        engine = Engine(model, **{**FEW, "num_blocks": 24, "block_size": 16}, backend=backend, graph_sizes=sizes)
    except NoBackendError as error:
        pytest.skip(f"{backend} does not run {name} here: {str(error).splitlines()[0]}")
    # What transformers computes by itself of these two copies from the host in each step.
    assert sorted(engine.graphs) == ([1, 2, 4] if captured and name not in ("Qwen3Next", "Jamba") else [])
    dirty(engine)
    assert run(engine, prompts(), 12) == expected
    assert run(engine, prompts()[::-1], 12) == expected[::-1]  # in slots that others have left
    engine.close()
