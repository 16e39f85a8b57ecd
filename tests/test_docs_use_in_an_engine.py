"""docs/use-in-an-engine.md: its snippets run."""

import pathlib
import re

import pytest

import attncore

PAGE = (pathlib.Path(__file__).parent.parent / "docs" / "use-in-an-engine.md").read_text()


def run(page):
    """What the page's snippets leave behind, run from top to bottom."""
    names = {}
    for snippet in re.findall(r"```python\n(.*?)```", page, re.DOTALL):
        exec(compile(snippet, "docs/use-in-an-engine.md", "exec"), names)
    return names


def test_the_snippets_run_from_top_to_bottom(monkeypatch):
    """With an assumed GPU, too: what ``reference`` computes is not captured there. What torch compiles without one, as
    it has to where it is for a CPU, serves both.
    """
    torch = pytest.importorskip("torch")
    pytest.importorskip("transformers", reason="transformers is not installed")
    monkeypatch.delenv("ATTNCORE_BACKEND", raising=False)
    monkeypatch.setenv("ATTNCORE_PLUGINS", "reference")  # others need the GPU that is assumed
    monkeypatch.setattr("attncore.registry.host.host.Host.torch_device", "cpu")  # there is no other here
    for device in ("cpu", "cuda:sm_90"):
        host = attncore.Host.assume(device)
        monkeypatch.setattr("attncore.registry.host.host.Host.probe", classmethod(lambda cls, host=host: host))
        monkeypatch.setattr(torch.cuda, "is_available", lambda device=device: device != "cpu")
        names = run(PAGE)
        assert names["choice"].name == "reference"
        assert names["logits"].shape == (1, 100)


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:.*deprecated:DeprecationWarning")  # of FlashAttention 4 while it compiles
@pytest.mark.filterwarnings("ignore:Argument aux_data:UserWarning")
@pytest.mark.parametrize("name", ["flashinfer", "flash"])
def test_the_snippets_run_on_a_gpu(name, monkeypatch):
    """In bfloat16, which the kernel libraries take; the graphs of the page are captured and replayed."""
    torch = pytest.importorskip("torch")
    pytest.importorskip("transformers", reason="transformers is not installed")
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    monkeypatch.delenv("ATTNCORE_BACKEND", raising=False)
    asked = 'dtype="float32", max_model_len=512'
    assert PAGE.count(asked) == 1
    try:
        choice = attncore.select(
            num_heads=8, num_kv_heads=2, head_size=64, dtype="bfloat16", max_model_len=512, backend=name
        )
    except attncore.NoBackendError as error:
        pytest.skip(f"{name} does not run here: {str(error).splitlines()[0]}")
    names = run(PAGE.replace(asked, f'dtype="bfloat16", max_model_len=512, backend={name!r}'))
    assert sorted(names["graphs"]) == ([1, 2, 4] if choice.spec.cuda_graph != "never" else [])
    assert names["logits"].shape == (1, 100)
