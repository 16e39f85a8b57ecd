"""``attncore show``: what a backend has, for people and for programs."""

import dataclasses
import json

import pytest
from cli.screens import WIDTHS

import attncore
from attncore.cli import main
from attncore.terminal import table_lines
from attncore.vocabulary import FEATURES

EXTRA = """
        features={"sinks"}, unsupported={"alibi": "the kernel takes no | slopes"}, cuda_graph="uniform",
        options={"mode": Option(str, "how it runs", default="fast", choices=("fast", "slow"))},
        variables={"ATTNCORE_ACME_DIR": "where it looks"}, notes=("first in its field",), requires=("numpy>=99",),
        variants=(Variant("new", head_sizes={32}, features={"sinks", "lse"}), Variant("old", cuda_graph="never")),
"""


@pytest.fixture
def acme(site):
    """A backend that states something of everything."""
    site.plugin("acme", None, extra=EXTRA)
    source = site.folder / "attn_acme.py"
    source.write_text(source.read_text().replace("import BackendSpec", "import Variant, Option, BackendSpec"))
    return site


@pytest.mark.parametrize("width", [None, *WIDTHS])
def test_everything_of_a_backend_can_be_read(acme, screen, width):
    code, out, err = screen("show", "acme", width=width)
    said = " ".join(out.split())
    assert (code, err) == (0, "")
    assert said.startswith("acme (attn-acme 1.0): loaded; it cannot run on cpu")
    for text in (
        "numpy>=99",
        "which is not accepted",
        "the kernel takes no | slopes",
        FEATURES["sinks"],
        "ATTNCORE_ACME_DIR",
        "where it looks",
        "first in its field",
        "fast, slow",
        "how it runs",
        "uniform: steps in which every request has the same number of tokens",
        "any (priority 5)",
    ):
        assert text in said, text
    lines = out.splitlines()
    if width in (None, 200):
        assert any(line.split() == ["head_sizes", "new", "32"] for line in lines)
        assert any(line.split() == ["head_sizes", "old", "64,", "128"] for line in lines)
        assert any(line.split()[:2] == ["sinks", "all"] for line in lines)
        assert any(line.split()[:2] == ["lse", "new"] for line in lines)


@pytest.mark.parametrize("width", [None, *WIDTHS])
@pytest.mark.parametrize("words", [["reference"], ["--all"], ["broken"]])
def test_the_screens(acme, screen, width, words):
    acme.plugin("broken", "raise RuntimeError('no licence file')")
    code, out, err = screen("show", *words, width=width)
    assert (code, err) == (1 if words == ["broken"] else 0, "")
    said = " ".join(out.split())
    assert {"reference": "it can run on cpu", "--all": "acme new no any", "broken": "no licence file"}[words[0]] in said


def test_json_has_every_field_of_every_variant(acme, capsys):
    assert main(["show", "acme", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    fields = {one.name for one in dataclasses.fields(attncore.BackendSpec)} - {"variants"}
    assert found["spec"].keys() == fields
    assert [(one["name"], one["spec"]["head_sizes"]) for one in found["variants"]] == [
        ("new", [32]),
        ("old", [64, 128]),
    ]
    assert all(one["spec"].keys() == fields and not one["runs_here"] for one in found["variants"])
    assert found["spec"]["block_sizes"] == {"multiple_of": 16, "maximum": None}
    assert found["spec"]["options"]["mode"] == {
        "type": "str", "default": "fast", "choices": ["fast", "slow"], "help": "how it runs",
    }  # fmt: skip
    assert (found["runs_here"], found["reasons"][0]["code"]) == (False, "requirement")
    assert found["requires"]["numpy>=99"].endswith("which is not accepted")
    assert main(["show", "--all", "--json"]) == 0
    assert [one["name"] for one in json.loads(capsys.readouterr().out)] == ["acme", "reference"]


def test_the_matrix_of_what_is_installed(acme, screen):
    code, out, err = screen("show", "--all", "--markdown")
    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert "| feature | acme new | acme old | reference |" in lines
    assert "| `sinks` | yes | yes | yes |" in lines
    assert "| `lse` | yes | ? | yes |" in lines
    assert "| acme new, acme old | `alibi` | the kernel takes no \\| slopes |" in lines
    assert "| cuda:sm_90 | 5 | 5 | 0 |" in lines
    assert {line.count(" | ") for line in lines if line.startswith("| `")} == {3}


def test_any_slopes_include_the_standard_ones(site, screen):
    site.plugin("acme", extra='features={"alibi"}')
    assert "| `alibi_standard` | yes | yes |" in screen("show", "--all", "--markdown")[1].splitlines()


@pytest.mark.parametrize(
    ("words", "code", "text"),
    [
        (
            ["refrence"],
            3,
            "NAME: no backend 'refrence' is installed; installed: acme, reference; did you mean ref",
        ),
        (["flash"], 3, "NAME: no backend 'flash' is installed; installed: acme, reference; pip install"),
        ([], 2, "NAME: none given; name a backend of `attncore list`, or give --all"),
        (["acme", "--all"], 2, "--all: not with NAME, which shows one backend"),
        (["acme", "--markdown"], 2, "--markdown: only with --all, and not with --json"),
        ([""], 2, "NAME: '' is empty; give a value"),
    ],
)
def test_mistakes_are_one_line(acme, screen, words, code, text):
    found, out, err = screen("show", *words)
    assert (found, out, err.count("\n")) == (code, "", 1)
    assert err.startswith(f"attncore: error: {text}")


def test_what_a_check_prints_does_not_spoil_the_answer(site, capsys):
    site.plugin("loud", extra='check=lambda request, host: print("hello") or ["too loud"]')
    assert main(["show", "loud", "--json"]) == 0
    captured = capsys.readouterr()
    assert json.loads(captured.out)["reasons"][0]["message"] == "too loud"
    assert "hello" in captured.err
    for words in (["loud"], ["--all"], ["--all", "--markdown"]):
        assert main(["show", *words]) == 0
        captured = capsys.readouterr()
        assert "hello" in captured.err
        assert "hello" not in captured.out


def test_a_word_wider_than_its_column_begins_beside_the_others():
    rows = [["preferred_block_size", "16"], ["factory", "a" * 50]]
    assert list(table_lines(["FACT", "VALUE"], rows, 62))[2:] == [f"{'factory':22}{'a' * 40}", f"{'':22}{'a' * 10}"]
