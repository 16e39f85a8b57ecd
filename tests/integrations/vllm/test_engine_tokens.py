"""vLLM with attncore's ``reference`` says what transformers says; with a planted fault it does not."""

import shutil
import sys

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed here; make test-engines has an environment with it")

from integrations.models import decoder, greedy
from integrations.vllm.cpu_engine import CLASSES, answers, engine, prompts_for

from attncore.cli import main
from attncore.integrations.vllm import registration
from attncore.integrations.vllm.layer import AttncoreImpl
from attncore.integrations.vllm.metadata_builder import AttncoreMetadataBuilder

COUNT, VOCABULARY = 12, 128
PROMPTS = prompts_for(VOCABULARY)
REFERENCE = "ATTNCORE_REFERENCE"


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Name of a kind of model -> the folder of a small one, and what transformers says after PROMPTS."""
    kept = {}

    def of(name):
        if name not in kept:
            folder = tmp_path_factory.mktemp(name)
            model = decoder(name, bos_token_id=1, eos_token_id=2, pad_token_id=0)
            model.save_pretrained(folder)
            kept[name] = folder, [greedy(model, prompt, COUNT) for prompt in PROMPTS]
        return kept[name]

    return of


@pytest.mark.parametrize("name", ["llama", "mistral", "qwen3", "gemma2"])
def test_tokens_are_those_of_transformers(saved, name):
    # Chunked prefill, prefix caching, full and windowed groups (gemma2) and soft caps are in these runs.
    folder, wanted = saved(name)
    with engine(folder, REFERENCE) as llm:
        found = answers(llm, PROMPTS, COUNT)
        assert answers(llm, PROMPTS, COUNT) == found  # now the prompts lie in the cache
    assert len({token for row in wanted for token in row}) > 10
    assert found == wanted


def test_attncores_own_choice_is_custom(saved):
    folder, wanted = saved("llama")
    more = {"additional_config": {"attncore": {"prefer": ["reference"]}}}
    with engine(folder, "CUSTOM", **more) as llm:
        assert answers(llm, PROMPTS, COUNT) == wanted


def test_drafts_of_the_prompt_change_no_token(saved):
    folder, wanted = saved("llama")
    drafts = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3, "prompt_lookup_min": 1}
    with engine(folder, "ATTNCORE_REFERENCE", speculative_config=drafts) as llm:
        assert answers(llm, PROMPTS, COUNT) == wanted


def test_swapped_rows_are_seen(saved, monkeypatch):
    folder, wanted = saved("llama")
    build = AttncoreMetadataBuilder.build

    def swapped(self, prefix, given, fast=False):
        return build(self, prefix, given.replace(block_table_tensor=given.block_table_tensor.flip(0)), fast)

    monkeypatch.setattr(AttncoreMetadataBuilder, "build", swapped)
    with engine(folder, REFERENCE) as llm:
        assert answers(llm, PROMPTS, COUNT) != wanted


def test_a_table_that_is_off_by_one_is_seen(saved, monkeypatch):
    folder, wanted = saved("llama")
    build = AttncoreMetadataBuilder.build

    def shifted(self, prefix, given, fast=False):
        return build(self, prefix, given.replace(block_table_tensor=(given.block_table_tensor - 1).clamp(0)), fast)

    monkeypatch.setattr(AttncoreMetadataBuilder, "build", shifted)
    with engine(folder, REFERENCE) as llm:
        assert answers(llm, PROMPTS, COUNT) != wanted


def test_swapped_keys_and_values_are_seen(saved, monkeypatch):
    folder, wanted = saved("llama")
    forward = AttncoreImpl.forward

    def swapped(self, layer, query, key, value, *rest, **more):
        return forward(self, layer, query, value, key, *rest, **more)

    monkeypatch.setattr(AttncoreImpl, "forward", swapped)
    with engine(folder, REFERENCE) as llm:
        assert answers(llm, PROMPTS, COUNT) != wanted


def test_a_backend_that_is_not_there_stops_the_engine_at_start(saved):
    folder, _ = saved("llama")
    with pytest.raises(Exception, match=r"Unknown attention backend: 'ATTNCORE_NOWHERE'.*ATTNCORE_REFERENCE"):
        with engine(folder, "ATTNCORE_NOWHERE"):
            pass


def test_a_bad_option_stops_the_engine_at_start(saved):
    folder, _ = saved("llama")
    with pytest.raises(
        Exception, match=r"additional_config\['attncore'\]: 'option' is not one of options, .*did you mean options\?"
    ):
        with engine(folder, REFERENCE, additional_config={"attncore": {"option": {}}}):
            pass


def test_classes_are_found_by_their_paths():
    from vllm.utils.import_utils import resolve_obj_by_qualname

    made = resolve_obj_by_qualname(f"{CLASSES}.{REFERENCE}")
    assert made is resolve_obj_by_qualname(f"{made.__module__}.{made.__qualname__}")


@pytest.fixture
def acme(request, tmp_path, monkeypatch):
    """A vendor's wheel as `attncore new-backend` writes it, not a line changed, installed in a folder on the path."""
    rendered, site = tmp_path / "acme", tmp_path / "site"
    assert main(["new-backend", "acme", str(rendered)]) == 0
    shutil.copytree(rendered / "src" / "attn_acme", site / "attn_acme")
    if broken := getattr(request, "param", ""):
        (site / "attn_acme" / "__init__.py").write_text(broken)
    info = site / "attn_acme-0.1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: attn-acme\nVersion: 0.1.0\n")
    (info / "entry_points.txt").write_text("[attncore.backends]\nacme = attn_acme\n")
    monkeypatch.syspath_prepend(str(site))
    registration.register()
    yield
    for name in [name for name in sys.modules if name.split(".")[0] == "attn_acme"]:
        del sys.modules[name]


def test_a_vendors_wheel_runs_unchanged(saved, acme):
    folder, wanted = saved("mistral")
    options = {"attncore": {"options": {"acme": {"scores": "float64"}}}}
    with engine(folder, "ATTNCORE_ACME", additional_config=options) as llm:
        assert answers(llm, PROMPTS, COUNT) == wanted


def test_a_vendors_bad_option_is_refused_with_its_own_words(saved, acme):
    folder, _ = saved("mistral")
    options = {"attncore": {"options": {"acme": {"scores": "int7"}}}}
    with pytest.raises(Exception, match=r"attncore: acme: .*scores.*int7"):
        with engine(folder, "ATTNCORE_ACME", additional_config=options):
            pass


@pytest.mark.parametrize("acme", ["raise OSError('libacme.so.7 is missing')\n"], indirect=True)
def test_a_broken_plugin_stops_no_other(saved, acme):
    folder, wanted = saved("llama")
    with engine(folder, REFERENCE) as llm:
        assert answers(llm, PROMPTS, COUNT) == wanted
    with pytest.raises(Exception, match=r"attncore: acme: .*libacme\.so\.7 is missing"):
        with engine(folder, "ATTNCORE_ACME"):
            pass
