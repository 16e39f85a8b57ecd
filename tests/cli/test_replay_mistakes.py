"""Mistakes in the options and the trace of attncore replay: one line that names them."""

import gzip
import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest
from replay_command import ran

from attncore.how_to_install import install_extra

BAD = {
    "no such file": (["absent.csv"], ["absent.csv", "No such file"]),
    "two traces": (["TRACE", "--trace", "other"], ["--trace", "other"]),
    "three words": (["TRACE", "other"], ["other"]),
    "unknown option": (["TRACE", "--fast"], ["--fast"]),
    "requests 0": (["TRACE", "--requests", "0"], ["--requests", "0 is not between 1 and"]),
    "requests in words": (["TRACE", "--requests", "all"], ["--requests", "'all'"]),
    "minutes 0": (["TRACE", "--minutes", "0"], ["--minutes", "0 is not between"]),
    "rate 0": (["TRACE", "--rate", "0"], ["--rate", "0 is not between"]),
    "rate nan": (["TRACE", "--rate", "nan"], ["--rate", "nan is not between"]),
    "clock": (["TRACE", "--clock", "step=-1"], ["--clock", "step is '-1'"]),
    "no clock": (["TRACE", "--clock", ""], ["--clock", "NAME=MICROSECONDS"]),
    "one block": (["TRACE", "--num-blocks", "1"], ["--num-blocks", "1 is not between 2 and"]),
    "blocks over int32": (["TRACE", "--num-blocks", "2147483648"], ["--num-blocks", "2147483647"]),
    "too few blocks": (["TRACE", "--num-blocks", "20", "--metadata-only"], ["row 1", "--num-blocks 20", "34"]),
    "too few blocks, attention": (["TRACE", "--num-blocks", "20"], ["row 1", "--num-blocks 20", "34"]),
    "block size 0": (["TRACE", "--block-size", "0"], ["--block-size", "0 is not between 1 and"]),
    "no sequences": (["TRACE", "--max-num-seqs", "-1"], ["--max-num-seqs", "-1 is not between 1 and"]),
    "no tokens": (["TRACE", "--max-num-batched-tokens", "0"], ["--max-num-batched-tokens", "0 is not between 1"]),
    "fewer tokens than sequences": (
        ["TRACE", "--max-num-seqs", "9", "--max-num-batched-tokens", "8"],
        ["--max-num-batched-tokens", "8 is less than --max-num-seqs 9"],
    ),
    "heads": (["TRACE", "--num-heads", "4", "--num-kv-heads", "3"], ["--num-kv-heads", "3 does not divide"]),
    "head size": (["TRACE", "--head-size", "1.5"], ["--head-size", "'1.5'"]),
    "layers": (["TRACE", "--layers", "0"], ["--layers", "0 is not between 1 and"]),
    "seed": (["TRACE", "--seed", "-1"], ["--seed", "-1 is not between 0 and"]),
    "verify": (["TRACE", "--verify-every", "0"], ["--verify-every", "0 is not between 1 and"]),
    "nowhere to save": (["TRACE", "--metadata-only", "--save-steps", "absent/x"], ["absent/x", "No such file"]),
    "nowhere to save to": (["TRACE", "--save-steps"], ["--save-steps", "no FILE given"]),
    "a gzipped name": (["TRACE", "--metadata-only", "--save-steps", "x.jsonl.gz"], ["--save-steps", "leave out .gz"]),
    "a packed name": (["TRACE", "--metadata-only", "--save-steps", "x.BZ2"], ["--save-steps", "leave out .BZ2"]),
    "a gzipped page": (["TRACE", "--metadata-only", "--html", "x.html.gz"], ["--html", "x.html.gz", "leave out .gz"]),
    "a name in colour": (
        ["TRACE", "--groups", "\x1b[31mred:16"],
        ["--groups", r"'\x1b[31mred' has letters that cannot be printed"],
    ),
    "group without a size": (["TRACE", "--groups", "full"], ["--groups", "'full' is not NAME:BLOCK_SIZE"]),
    "group of size 0": (["TRACE", "--groups", "full:0"], ["--groups", "block size of full 0 is not between 1"]),
    "group twice": (["TRACE", "--groups", "a:16,a:32"], ["--groups", "'a' stands twice"]),
    "group and block size": (
        ["TRACE", "--groups", "full:16", "--block-size", "16"],
        ["--block-size", "16 given beside --groups"],
    ),
    "fewer layers than groups": (
        ["TRACE", "--groups", "a:16,b:16", "--layers", "1"],
        ["--layers", "1 given for 2 groups"],
    ),
    "too few blocks in a group": (
        ["TRACE", "--groups", "a:16,b:8:4", "--num-blocks", "40"],
        ["row 1", "blocks of 8 of group 'b'", "--num-blocks 40"],
    ),
    "no drafts": (["TRACE", "--speculative", "0"], ["--speculative", "K 0 is not between 1 and"]),
    "acceptance": (["TRACE", "--speculative", "3:1.5"], ["--speculative", "1.5 is not between 0 and 1"]),
    "fewer tokens than drafts": (
        ["TRACE", "--speculative", "3", "--max-num-seqs", "9", "--max-num-batched-tokens", "32"],
        ["--max-num-batched-tokens", "32 is less than --max-num-seqs 9 times 4 (--speculative)"],
    ),
    "one rank": (["TRACE", "--context-parallel", "1"], ["--context-parallel", "WORLD 1 is not between 2 and"]),
    "ranks in words": (["TRACE", "--context-parallel", "2:1:1"], ["--context-parallel", "is not WORLD or WORLD:INTER"]),
    "ranks of a window": (
        ["TRACE", "--groups", "a:16,b:16:4", "--context-parallel", "2"],
        ["--context-parallel", "group 'b' of --groups has a sliding window"],
    ),
    "ranks of other sizes": (
        ["TRACE", "--groups", "a:16,b:8", "--context-parallel", "2"],
        ["--context-parallel", "blocks of 16 and 8 tokens"],
    ),
    "interleave": (
        ["TRACE", "--context-parallel", "2:3"],
        ["--context-parallel", "3 does not divide the block size 16"],
    ),
    "a backend of nothing": (
        ["TRACE", "--metadata-only", "--backend", "cpu"],
        ["--backend", "'cpu' given beside --metadata-only, which runs none"],
    ),
    "an option of nothing": (["TRACE", "--option", "a=1"], ["--option", "'a=1' given without --backend"]),
    "an option without attention": (
        ["TRACE", "--metadata-only", "--option", "a=1"],
        ["--option", "'a=1' given beside --metadata-only"],
    ),
    "saved over the model": (["--model", "TRACE", "--save-steps", "TRACE"], ["--save-steps", "the model's own"]),
    "a page over the trace": (["TRACE", "--metadata-only", "--html", "TRACE"], ["--html", "the trace itself"]),
    "a page over the steps": (
        ["TRACE", "--metadata-only", "--save-steps", "x", "--html", "./x"],
        ["--html", "the file of --save-steps"],
    ),
    "saved over itself": (["TRACE", "--metadata-only", "--save-steps", "TRACE"], ["--save-steps", "the trace itself"]),
}


@pytest.mark.parametrize(("words", "named"), BAD.values(), ids=BAD.keys())
def test_a_mistake_is_one_line_that_names_it(capsys, trace, tmp_path, monkeypatch, words, named):
    monkeypatch.chdir(tmp_path)
    before = Path(trace).read_bytes()
    code, out, err = ran(capsys, *(trace if word == "TRACE" else word for word in words))
    assert (code, out) == (2, "")
    assert err.startswith("attncore: error: ")
    assert err.count("\n") == 1
    for word in named:
        assert word in err
    assert [path.name for path in tmp_path.iterdir()] == ["trace.jsonl"]
    assert Path(trace).read_bytes() == before


@pytest.mark.parametrize("option", ["--save-steps", "--html"])
def test_a_file_that_is_read_as_standard_input_is_not_written_to(trace, tmp_path, option):
    before = Path(trace).read_bytes()
    command = [sys.executable, "-m", "attncore", "replay", "-", "--metadata-only", "--json", option, "trace.jsonl"]
    with open(trace, "rb") as file:
        done = subprocess.run(command, stdin=file, capture_output=True, text=True, cwd=tmp_path, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == f"attncore: error: {option}: trace.jsonl is the trace itself; give another\n"
    assert Path(trace).read_bytes() == before


def test_a_backend_that_is_none_is_one_line(capsys, trace):
    pytest.importorskip("torch")
    code, out, err = ran(capsys, trace, "--backend", "referense")
    assert (code, out, err.count("\n")) == (3, "", 1)
    assert err.startswith("attncore: error: --backend: no backend 'referense' is installed; installed: ")
    assert err.endswith("; did you mean reference?\n")


def test_a_broken_trace_is_one_line_and_leaves_no_steps(capsys, tmp_path):
    path = tmp_path / "trace.csv.gz"
    rows = "".join(f"2023-11-16 18:15:{second}.0,9,9\r\n" for second in range(10, 60))
    path.write_bytes(gzip.compress(f"TIMESTAMP,ContextTokens,GeneratedTokens\r\n{rows}".encode())[:-9])
    code, out, err = ran(capsys, str(path), "--metadata-only", "--save-steps", str(tmp_path / "steps"))
    assert (code, out) == (2, "")
    assert str(path) in err
    assert "gzip" in err
    assert err.count("\n") == 1
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["replay", "--model", "absent.json"], "--model: absent.json cannot be read: No such file or directory"),
        (["replay", "--html", "absent/x.html"], "absent/x.html cannot be written: No such file or directory"),
        (["bench", "reference", "--html", "absent/x.html"], "absent/x.html cannot be written: No such file"),
    ],
    ids=lambda value: "-".join(value[:2]) if isinstance(value, list) else "",
)
def test_a_mistyped_file_is_said_before_torch_is_imported(words, said, tmp_path):
    """Which takes seconds, and transformers more of them."""
    for needed in ("torch", "transformers", "pygal"):  # found, not imported: pygal leaves a finder that Python warns of
        if importlib.util.find_spec(needed) is None:
            pytest.skip(f"{needed} is not installed")
    program = (
        f"import sys; from attncore.cli import main; code = main({words!r}); sys.exit('torch' in sys.modules or code)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=tmp_path, check=False)
    assert done.returncode == 2, done.stderr
    assert said in done.stderr


def test_a_row_that_is_cut_is_said_to_be_the_last(capsys, tmp_path):
    path = tmp_path / "trace.csv"
    whole = "TIMESTAMP,ContextTokens,GeneratedTokens\r\n2023-11-16 18:15:00.0,30,4\r\n"
    cut = "; it is the last line and has no line end: the file may be cut"
    for row, end in ("2023-11-16 18:15:01.0,30,", cut), ("2023-11-16 18:15:01.0,30,\r\n", ""):
        path.write_bytes((whole + row).encode())
        code, out, err = ran(capsys, str(path), "--metadata-only")
        assert (code, out) == (2, "")
        assert err.endswith(f"row 2 (line 3): GeneratedTokens: '' is not a whole number of tokens{end}\n")


def test_a_last_number_that_may_be_cut_is_said(capsys, tmp_path):
    """Where the row is replayed, and no checksum says that the file is whole."""
    path = tmp_path / "trace.csv"
    rows = "TIMESTAMP,ContextTokens,GeneratedTokens\r\n2023-11-16 18:15:00.0,30,4\r\n2023-11-16 18:15:01.0,30,4"
    note = (
        f"attncore replay: note: {path}: row 2 (line 3), the last, has no line end: the file may be cut, and its "
        "GeneratedTokens, 4, be the beginning of a number\n"
    )
    for data, words, expected in (
        (rows.encode(), [], note),
        (rows.encode(), ["--requests", "1"], ""),
        (rows.encode() + b"\n", [], ""),
        (gzip.compress(rows.encode()), [], ""),
    ):
        path.write_bytes(data)
        code, _, err = ran(capsys, str(path), "--metadata-only", *words)
        assert (code, err) == (0, expected)


@pytest.mark.parametrize("missing", ["torch", "transformers", "transformers and torch"])
def test_a_model_without_its_libraries_names_them(capsys, trace, monkeypatch, missing):
    for name in missing.split(" and "):
        monkeypatch.setitem(sys.modules, name, None)
    code, out, err = ran(capsys, trace, "--model", "config.json")
    assert (code, out) == (2, "")
    verb = "are" if " and " in missing else "is"
    assert err == f"attncore: error: --model: {missing} {verb} not installed: {install_extra('transformers')}\n"
