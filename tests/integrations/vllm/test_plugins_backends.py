"""vLLM with the backends of the plugins over their stand-ins, on a CPU: its engine knows what no test by hand knows."""

from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed here; make test-engines has an environment with it")

from integrations.models import decoder
from integrations.vllm.cpu_engine import answers, engine, prompts_for

from attncore import BackendConfig
from attncore.integrations.vllm import metadata_builder

COUNT, PROMPTS = 8, prompts_for(128)
PLUGINS = Path(__file__).parents[3] / "plugins"


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """The folder of a small model, and what the engine says with ``reference``."""
    folder = tmp_path_factory.mktemp("llama")
    decoder("llama", bos_token_id=1, eos_token_id=2, pad_token_id=0, head_dim=64).save_pretrained(folder)
    with engine(folder, "ATTNCORE_REFERENCE", dtype="float16") as llm:
        return folder, answers(llm, PROMPTS, COUNT)


def flash(config):
    import attn_flash
    from attn_flash.backend import FlashBackend

    return FlashBackend(BackendConfig(**config, spec=attn_flash.attncore_backend(), variant="fa3_vllm"))


def flashinfer(config):
    import flashinfer_standin

    return flashinfer_standin.backend(**config)


@pytest.fixture(params=[flash, flashinfer], ids=["flash", "flashinfer"])
def standing_in(request, monkeypatch):
    """Layers that ask for ``reference`` get the plugin's backend over its stand-in."""
    for part in ("src", "tests"):
        monkeypatch.syspath_prepend(str(PLUGINS / f"attn-{request.param.__name__}" / part))
    if request.param is flash:
        from flash_standin import MADE, install

        install(monkeypatch, "3_vllm", MADE["3_vllm"]())
    choice_for, made = metadata_builder.choice_for, []

    def chosen(*args, **more):
        config = choice_for(*args, **more).create("cpu").config
        names = "num_heads", "num_kv_heads", "head_size", "dtype", "block_size"
        backend = request.param({name: getattr(config, name) for name in names})
        made.append(backend)
        return SimpleNamespace(name=backend.name, spec=backend.spec, create=lambda device: backend)

    monkeypatch.setattr(metadata_builder, "choice_for", chosen)
    return made


def test_tokens_are_those_of_reference(saved, standing_in):
    """Prompts in chunks, prefixes that are cached, and a cache whose number of blocks vLLM tells no builder."""
    folder, wanted = saved
    with engine(folder, "ATTNCORE_REFERENCE", dtype="float16") as llm:
        assert answers(llm, PROMPTS, COUNT) == wanted
        assert answers(llm, PROMPTS, COUNT) == wanted
    assert len({token for row in wanted for token in row}) > 10
    assert standing_in
