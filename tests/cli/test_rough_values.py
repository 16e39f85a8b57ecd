"""Values of options that Python would take, and that are mistakes: other digits, folders for files, names twice."""

import os
import subprocess
import sys

import pytest

from attncore.cli import main

INTEGERS = ["1_0", "\u0661\u0660", " 5", "5\n", "0x10", "1.0", "\uff15"]
WHOLE = {
    "bounds": ["replay", "--metadata-only", "--requests"],
    "drafts": ["replay", "--metadata-only", "--speculative"],
    "plain": ["explain", "--num-heads"],
    "verify": ["verify", "--head-size"],
}


def refused(capsys, *words):
    code = main(list(words))
    out, err = capsys.readouterr()
    assert (code, out, err.count("\n")) == (2, "", 1), err
    return err


@pytest.mark.parametrize("text", INTEGERS)
@pytest.mark.parametrize("words", WHOLE.values(), ids=WHOLE)
def test_a_whole_number_is_of_ascii_digits(words, text, capsys):
    err = refused(capsys, *words, text)
    assert words[-1] in err
    assert "is not a whole number" in err


@pytest.mark.parametrize("text", ["1_0.5", "\u0661", " 5", "1e\u0661"])
@pytest.mark.parametrize(
    "words", [["replay", "--rate"], ["explain", "--logits-soft-cap"], ["verify", "reference", "--timeout"]]
)
def test_a_number_is_ascii(words, text, capsys):
    err = refused(capsys, *words, text)
    assert words[-1] in err
    assert "is not a number" in err


def test_a_whole_number_has_63_bits_at_most(capsys):
    assert "--num-heads: '9223372036854775808' has more than 63 bits" in refused(
        capsys, "explain", "--num-heads", str(2**63)
    )


@pytest.mark.parametrize("text", [*INTEGERS, str(2**63)])
def test_an_option_of_a_backend_is_of_ascii_digits(text, site, capsys):
    site.plugin(
        "acme",
        extra=" options={'i': attncore.Option(int, 'a number')},".replace("attncore.", "__import__('attncore')."),
    )
    err = refused(capsys, "explain", "--backend", "acme", "--option", f"i={text}")
    assert "--option: 'i': " in err
    assert "is not an int" in err


def test_an_assumed_package_is_named_once(capsys):
    words = ["explain", "--assume-package", "Torch==1", "--assume-package", "torch==2.9"]
    assert "--assume-package: 'torch' is given twice" in refused(capsys, *words)


@pytest.mark.parametrize("text", ["torch==x y", "torch", "==1", "to rch==1", "torch==1.*", "torch==1==2"])
def test_an_assumed_package_has_a_name_and_a_version(text, capsys):
    err = refused(capsys, "explain", "--assume-package", text)
    assert f"--assume-package: {text!r} is not NAME==VERSION" in err


@pytest.mark.parametrize("option", ["--prefer", "--exclude"])
@pytest.mark.parametrize("text", [",", "", " , "])
def test_a_list_of_names_has_one(option, text, capsys):
    assert f"{option}: {text!r} names no backend" in refused(capsys, "explain", option, text)


@pytest.mark.parametrize("ending", ["/", "/."])
@pytest.mark.parametrize(
    "words",
    [["replay", "--metadata-only"], ["build"], ["explain", "--config"], ["bench", "reference", "--steps"]],
    ids=lambda words: words[0],
)
def test_a_file_is_not_read_by_the_name_of_a_folder(words, ending, tmp_path, trace, capsys):
    file = tmp_path / "config.json"
    file.write_text('{"model_type": "llama"}')
    name = f"{trace if words[0] == 'replay' else file}{ending}"
    err = refused(capsys, *words, name)
    assert name in err
    assert "Not a directory" in err or "is the name of a folder" in err


@pytest.mark.parametrize("option", ["--save-steps", "--html"])
def test_a_dash_is_no_file(option, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    err = refused(capsys, "replay", "--metadata-only", "--requests", "1", option, "-")
    assert err.startswith(f"attncore: error: {option}: '-' is not written to")
    assert not [*tmp_path.iterdir()]


def test_an_entry_point_without_a_module_is_said(site, capsys):
    info = site.plugin("acme")
    (info / "entry_points.txt").write_text("# ours\n[attncore.backends]\nacme attn_acme\n")
    main(["list"])
    out = " ".join(capsys.readouterr().out.split())
    assert "line 3, 'acme attn_acme', is not of the form NAME = MODULE" in out
    assert "Pair" not in out


def test_numba_that_compiles_nothing_is_said():
    pytest.importorskip("numba")
    words = [sys.executable, "-m", "attncore", "build", "--kernels", "numba", os.devnull]
    environ = {**os.environ, "NUMBA_DISABLE_JIT": "1"}
    done = subprocess.run(words, env=environ, capture_output=True, text=True, check=False, timeout=100)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "numba compiles nothing where NUMBA_DISABLE_JIT is set; unset NUMBA_DISABLE_JIT" in done.stderr
    assert "AttributeError" not in done.stderr
