"""The documents of the contract, compared with the code; their Python runs."""

import dataclasses
import inspect
import re
import tomllib
from pathlib import Path

import pytest

import attncore
from attncore import env, vocabulary
from attncore.abstract.first_generation_names import FirstGenerationNames
from attncore.cli import new_backend
from attncore.registry.plugins import known_backends
from attncore.registry.plugins.hookspecs import Hooks
from attncore.registry.spec.variant import VariantFacts

DOCS = Path(__file__).parents[2] / "docs"
CONTRACT = (DOCS / "contract.md").read_text()
NEGOTIATION = (DOCS / "negotiation.md").read_text()


def first_column(text, header):
    """The names in the first column of the table whose header begins with ``header``."""
    lines = text[text.index(f"| {header} |") :].splitlines()[2:]
    rows = lines[: next((i for i, line in enumerate(lines) if not line.startswith("|")), len(lines))]
    return {row.split("|")[1].strip().strip("`"): row.split("|")[2] for row in rows}


def public(kind):
    return {name for name in dir(kind) if not name.startswith("_")}


def test_names_to_import():
    names = first_column(CONTRACT, "name")
    assert names.keys() <= set(attncore.__all__)
    vendors = {"AttentionBackend", "AttentionImpl", "BackendSpec", "hookimpl", "ATTNCORE_API", "MultipleOf", "Variant"}
    assert vendors <= names.keys()


def test_the_version():
    assert f"which is **{attncore.ATTNCORE_API}**" in CONTRACT


def test_hooks():
    assert first_column(CONTRACT, "hook").keys() == public(Hooks)


def test_fields_of_a_spec():
    fields = {one.name for one in dataclasses.fields(attncore.BackendSpec)}
    assert first_column(CONTRACT, "field").keys() == fields
    assert all(meaning.strip() for meaning in first_column(CONTRACT, "field").values())
    assert VariantFacts.__annotations__.keys() == fields - {
        "name",
        "api",
        "requires",
        "install",
        "variables",
        "variants",
    }
    required = [one.name for one in dataclasses.fields(attncore.BackendSpec) if one.default is one.default_factory]
    sentence = CONTRACT[: CONTRACT.index("are required.")].rpartition("\n\n")[2]
    assert set(re.findall(r"`(\w+)`", sentence)) == set(required)


def test_fields_of_a_request():
    fields = {one.name for one in dataclasses.fields(attncore.AttentionRequest)}
    assert first_column(NEGOTIATION, "field").keys() == fields


def test_vocabularies():
    code = {
        "dtypes": vocabulary.DTYPES,
        "kv_cache_dtypes": vocabulary.KV_CACHE_DTYPES,
        "kv_cache_layouts": vocabulary.KV_CACHE_LAYOUTS,
        "cuda_graph": tuple(vocabulary.GRAPH_LEVELS),
        "phases": vocabulary.PHASES,
        "host_lengths": tuple(vocabulary.HOST_LENGTHS),
        "plan_staging": tuple(vocabulary.PLAN_STAGING),
        "policy": vocabulary.POLICIES,
        "state": vocabulary.STATES,
    }
    written = {name: tuple(re.findall(r"`(\w+)`", row)) for name, row in first_column(CONTRACT, "vocabulary").items()}
    assert written == code
    assert first_column(CONTRACT, "feature").keys() == set(vocabulary.FEATURES)
    assert first_column(CONTRACT, "code").keys() == set(vocabulary.REASON_CODES)
    assert first_column(NEGOTIATION, "state").keys() == set(vocabulary.STATES)


@pytest.mark.parametrize(
    ("field", "words"),
    [
        ("cuda_graph", vocabulary.GRAPH_LEVELS),
        ("host_lengths", vocabulary.HOST_LENGTHS),
        ("plan_staging", vocabulary.PLAN_STAGING),
        ("pad_seq_len", vocabulary.PAD_SEQ_LEN),
        ("finite_tail", vocabulary.FINITE_TAIL),
    ],
)
def test_the_words_of_a_field_have_the_sentences_of_the_code_and_an_example(field, words):
    text = CONTRACT[CONTRACT.index(f"| {field} | meaning | for example |") :].partition("\n\n")[0]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines()[2:]]
    assert {word.strip("`"): meaning for word, meaning, _ in rows} == {str(word): text for word, text in words.items()}
    assert all(example for *_, example in rows)


def test_features_have_the_sentences_of_the_code():
    written = {name: meaning.strip() for name, meaning in first_column(CONTRACT, "feature").items()}
    assert {name: meaning.replace("`", "") for name, meaning in written.items()} == dict(vocabulary.FEATURES)


def test_names_follow_from_the_backends_name():
    """In the page's example, in the template's, and of the plugins of this repository."""
    (name, package), *_ = re.findall(r'^(\w+) = "(\w+)"$', CONTRACT, re.M)
    assert package == f"attn_{name}"
    assert f'factory="{package}.backend:{name.capitalize()}Backend"' in CONTRACT
    words = new_backend.names("acme.v2-x")
    assert words["distribution"] == "attn-acme-v2-x"
    assert words["package"] == words["distribution"].replace("-", "_")
    for folder in (DOCS.parent / "plugins").iterdir():
        project = tomllib.loads((folder / "pyproject.toml").read_text())["project"]
        assert project["name"] == folder.name
        entries = project["entry-points"]["attncore.backends"]
        assert entries == {folder.name.removeprefix("attn-"): folder.name.replace("-", "_")}


def test_members_of_a_backend():
    members = first_column(CONTRACT, "member of AttentionBackend")
    of_instances = {"config"}
    assert members.keys() - of_instances == (public(attncore.AttentionBackend) - public(FirstGenerationNames)) | {
        "impl_class"
    }
    aliases = CONTRACT[CONTRACT.index("names of the first generation") :].partition("\n\n")[0]
    mixed_in = public(FirstGenerationNames) - {"kv_cache_shape"}
    assert mixed_in == set(re.findall(r"`(\w+)`", aliases))


def test_arguments_of_an_impl():
    for kind in (attncore.AttentionImpl.__init__, attncore.AttentionImpl.forward):
        for name in list(inspect.signature(kind).parameters)[1:]:
            assert re.search(rf"\b{name}\b", CONTRACT), name


def test_reasons_and_variables():
    for one in dataclasses.fields(attncore.Reason):
        assert re.search(rf"\b{one.name}\b", CONTRACT)
    security = (DOCS.parent / "SECURITY.md").read_text()
    for name in re.findall(r"ATTNCORE_[A-Z_]+", CONTRACT + NEGOTIATION + security):
        assert name in env.VARIABLES or name in attncore.__all__, name
    for name, one in known_backends.KNOWN.items():
        assert f"`{name}`" in NEGOTIATION
        assert one.distribution in NEGOTIATION


@pytest.mark.parametrize("text", [CONTRACT, NEGOTIATION], ids=["contract", "negotiation"])
def test_the_python_in_them_runs(text, capsys):
    pytest.importorskip("torch")
    blocks = re.findall(r"```python\n(.*?)```", text, re.S)
    assert blocks
    for block in blocks:
        exec(compile(block, "<document>", "exec"), {})
