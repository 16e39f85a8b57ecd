"""attncore replay, as its user meets it."""

import gzip
import json
import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest

from attncore.cli import main
from attncore.replay import rank_builders
from attncore.replay.layers.attention_layers import AttentionLayers
from attncore.replay.scheduling.cost_model import CostModel
from attncore.replay.traces import synthetic

TIMES = ("build_us", "attention_us", "wall_s")
SMALL = ["--num-heads", "2", "--num-kv-heads", "1", "--head-size", "8", "--layers", "1"]
TRACES = Path(__file__).parents[3] / "shared" / "traces"


@pytest.fixture
def trace(tmp_path):
    """A trace of three requests; 513 and 520 tokens of the prompts are longer than a default block of ids."""
    path = tmp_path / "trace.jsonl"
    records = [
        {"timestamp": 0, "input_length": 513, "output_length": 6, "hash_ids": [0, 1]},
        {"timestamp": 40, "input_length": 30, "output_length": 9, "hash_ids": [2]},
        {"timestamp": 90, "input_length": 520, "output_length": 3, "hash_ids": [0, 3]},
    ]
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return str(path)


def ran(capsys, *words):
    code = main(["replay", *words])
    output = capsys.readouterr()
    return code, output.out, output.err


def reported(capsys, *words):
    code, out, err = ran(capsys, *words, "--json")
    assert (code, err) == (0, "")
    return json.loads(out)


def test_the_report_of_attention(capsys, trace):
    pytest.importorskip("torch")
    report = reported(capsys, trace, *SMALL, "--verify-every", "1")
    assert {
        name: report[name]
        for name in (
            "requests",
            "tokens",
            "prefill_tokens",
            "decode_tokens",
            "prefix_hit_tokens",
            "preemptions",
            "backend",
        )
    } == {
        "requests": 3,
        "tokens": 513 + 30 + 520 - 512 + 5 + 8 + 2,
        "prefill_tokens": 513 + 30 + 520 - 512,
        "decode_tokens": 5 + 8 + 2,
        "prefix_hit_tokens": 512,
        "preemptions": 0,
        "backend": "reference",
    }
    assert report["trace"] == {"source": trace, "format": "mooncake"}
    assert report["batch"]["widest_row"] == 33
    assert report["batch"]["prefill_tokens"]["max"] == 513
    assert report["batch"]["decodes"]["max"] <= report["batch"]["requests"]["max"] <= 3
    for name in ("build_us", "attention_us"):
        assert list(report[name]) == ["p50", "p90", "p99", "max"]
        assert 0 < report[name]["p50"] <= report[name]["p90"] <= report[name]["p99"] <= report[name]["max"]
    assert report["verification"]["checked"] > 6
    assert report["verification"]["failed"] == 0
    assert 0 <= report["verification"]["max_abs_error"] < 1e-5
    assert report["kernels"] in ("cython", "numba")
    assert report["why"].startswith("chosen; ")


def test_torch_s_threads_are_those_asked_for_and_only_meanwhile(capsys, trace, monkeypatch):
    torch = pytest.importorskip("torch")
    before, seen = torch.get_num_threads(), set()
    forward = AttentionLayers.forward

    def watched(*args):
        seen.add(torch.get_num_threads())
        return forward(*args)

    monkeypatch.setattr(AttentionLayers, "forward", watched)
    reported(capsys, trace, *SMALL)
    assert seen == {1}
    reported(capsys, trace, *SMALL, "--threads", "3")
    assert seen == {1, 3}
    assert torch.get_num_threads() == before


def test_the_report_of_metadata_only(capsys, trace):
    report = reported(capsys, "--trace", trace, "--metadata-only", "--verify-every", "1")
    assert report["attention_us"] is None
    assert report["backend"] is None
    assert report["verification"] == {
        "checked": report["steps"], "failed": 0, "max_abs_error": None, "failures": []
    }  # fmt: skip


@pytest.mark.parametrize("metadata_only", [True, False])
def test_the_same_command_gives_the_same_json_but_for_times(capsys, metadata_only):
    if metadata_only:
        words = ["--metadata-only", "--requests", "60", "--num-blocks", "600", "--seed", "4"]
    else:
        pytest.importorskip("torch")
        words = [*SMALL, "--requests", "3", "--verify-every", "2", "--seed", "4"]
    one, two = (reported(capsys, *words) for _ in range(2))
    for report in (one, two):
        for name in TIMES:
            del report[name]
    assert one == two
    assert one["trace"]["source"] == "synthetic"


def test_options_change_what_they_name(capsys, trace):
    plain = reported(capsys, trace, "--metadata-only")
    assert reported(capsys, trace, "--metadata-only", "--requests", "2")["requests"] == 2
    assert reported(capsys, trace, "--metadata-only", "--minutes", "0.001")["requests"] == 2
    assert reported(capsys, trace, "--metadata-only", "--max-num-seqs", "1")["batch"]["requests"]["max"] == 1
    chunked = reported(capsys, trace, "--metadata-only", "--max-num-batched-tokens", "16")
    assert chunked["batch"]["prefill_tokens"]["max"] == 16
    assert reported(capsys, trace, "--metadata-only", "--block-size", "32")["batch"]["widest_row"] == 17
    assert reported(capsys, trace, "--metadata-only", "--rate", "0.001")["virtual_s"] > plain["virtual_s"]
    assert reported(capsys, trace, "--metadata-only", "--clock", "step=1e6")["virtual_s"] > plain["virtual_s"]
    assert reported(capsys, trace, "--metadata-only", "--num-blocks", "35")["prefix_hit_tokens"] <= 512


def test_the_table_ends_with_a_sentence(capsys, trace):
    code, out, err = ran(capsys, trace, "--metadata-only")
    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert max(map(len, lines)) <= max(80, len(lines[0]))
    assert any(line.startswith("metadata build, us") for line in lines)
    assert (
        " ".join(out.split()).rpartition(" OK: 3 requests were served in ")[2].endswith("what a plain recount gives.")
    )


def test_a_failed_check_ends_with_1_and_names_the_field(capsys, trace, monkeypatch):
    class Faulty(rank_builders.MetadataBuilder):
        def build(self, scheduled):
            metadata = super().build(scheduled)
            metadata.host.logits_indices[0] += 1
            return metadata

    monkeypatch.setattr(rank_builders, "MetadataBuilder", Faulty)
    code, out, _ = ran(capsys, trace, "--metadata-only", "--verify-every", "1")
    assert code == 1
    assert "failed: step 0: logits_indices: [0] is" in out
    assert "FAILED: " in out.splitlines()[-1]
    code, out, _ = ran(capsys, trace, "--metadata-only", "--verify-every", "1", "--json")
    report = json.loads(out)
    assert code == 1
    assert report["verification"]["failed"] == report["verification"]["checked"] == report["steps"]


def test_metadata_only_imports_no_torch(trace):
    program = (
        "import sys; from attncore.cli import main; code = main(sys.argv[1:]); "
        "sys.exit(code or 10 * ('torch' in sys.modules))"
    )
    words = [sys.executable, "-c", program, "replay", trace, "--metadata-only"]
    assert subprocess.run(words, stdout=subprocess.DEVNULL, check=False, timeout=120).returncode == 0


def test_attention_without_torch_ends_with_3_and_says_what_to_do(capsys, trace, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    code, out, err = ran(capsys, trace)
    assert (code, out) == (3, "")
    assert "pip install attncore[torch]" in err
    assert "--metadata-only" in err
    assert err.count("\n") == 1


def test_an_unknown_backend_ends_with_3(capsys, trace):
    pytest.importorskip("torch")
    code, out, err = ran(capsys, trace, "--backend", "nonesuch")
    assert (code, out) == (3, "")
    assert "nonesuch" in err


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
    "another backend's ranks": (
        ["TRACE", "--context-parallel", "2", "--backend", "other"],
        ["--context-parallel", "--backend is other"],
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


def test_steps_are_saved(capsys, trace, tmp_path):
    path = tmp_path / "steps.jsonl"
    report = reported(capsys, trace, "--metadata-only", "--save-steps", str(path))
    assert len(path.read_text().splitlines()) == report["steps"]


PATHS = {
    "groups": ["--groups", "full:16,window:8:40,other:32"],
    "drafts": ["--speculative", "3:0.5"],
    "ranks": ["--context-parallel", "2:4"],
    "groups and drafts": ["--groups", "full:16,window:16:40", "--speculative", "2"],
    "all three": ["--groups", "a:16,b:16", "--speculative", "2", "--context-parallel", "2"],
}


@pytest.mark.parametrize("attention", [False, True])
@pytest.mark.parametrize("words", PATHS.values(), ids=PATHS.keys())
def test_groups_drafts_and_ranks_are_verified_and_reported(capsys, trace, words, attention):
    if attention:
        pytest.importorskip("torch")
    how = ["--num-heads", "2", "--num-kv-heads", "1", "--head-size", "8"] if attention else ["--metadata-only"]
    report = reported(capsys, trace, *words, *how, "--verify-every", "1")
    assert report["verification"]["failed"] == 0
    assert report["verification"]["checked"] >= (6 if attention else report["steps"])
    assert report["options"]["layers"] == max(2, words[1].count(",") + 1)
    for name in ("groups", "speculative", "context_parallel"):
        assert (name in report["options"]) == (f"--{name.replace('_', '-')}" in words)
    assert ("passed_blocks" in report) == ("--groups" in words)
    if any("window" in word for word in words):
        assert report["passed_blocks"] > 20
    if "--speculative" in words:
        drafts = report["speculative"]
        assert 0 < drafts["accepted"] < drafts["drafted"]
        assert report["decode_tokens"] + drafts["accepted"] == 5 + 8 + 2 + drafts["drafted"]
        assert report["steps"] < reported(capsys, trace, "--metadata-only")["steps"]
    _, out, _ = ran(capsys, trace, *words, *how)
    assert max(map(len, out.splitlines()[1:])) <= 80
    assert ("groups  " in out, "drafts  " in out, "ranks  " in out) == tuple(
        option in words for option in ("--groups", "--speculative", "--context-parallel")
    )


@pytest.mark.parametrize("words", PATHS.values(), ids=PATHS.keys())
def test_saved_steps_are_what_build_reads_with_the_same_options(capsys, trace, tmp_path, words):
    path = tmp_path / "steps.jsonl"
    report = reported(capsys, trace, *words, "--metadata-only", "--save-steps", str(path))
    as_built = {"3:0.5": "3", "2:4": "2:1:4"}
    words = [as_built.get(word, word) for word in words]
    if words[-2] == "--context-parallel" and words[-1] == "2":
        words[-1] = "2:1"
    assert main(["build", str(path), *words]) == 0
    answers = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert len(answers) == report["steps"]
    assert sum(len(answer["positions"]) for answer in answers) == report["tokens"]
    assert ("groups" in answers[0]) == ("--groups" in words)


@pytest.mark.skipif(sys.platform == "win32", reason="no pseudo-terminals")
def test_progress_is_shown_on_a_terminal_only(trace):
    words = [sys.executable, "-m", "attncore", "replay", trace, "--metadata-only", "--json"]
    leader, follower = pty.openpty()
    with_terminal = subprocess.run(words, stdout=subprocess.PIPE, stderr=follower, check=True, timeout=120)
    os.close(follower)
    shown = os.read(leader, 65536).decode()
    os.close(leader)
    assert "3/3" in shown
    assert json.loads(with_terminal.stdout)["requests"] == 3
    without = subprocess.run(words, capture_output=True, check=True, timeout=120)
    assert without.stderr == b""


def test_the_whole_azure_slice_is_verified(capsys):
    path = TRACES / "azure_llm_2023_conv.csv.gz"
    if not path.exists():
        pytest.skip("the Azure slice is not beside the checkout (../shared/traces)")
    report = reported(capsys, str(path), "--metadata-only")
    assert report["requests"] == 5000
    assert report["prefill_tokens"] == 5_805_639
    assert report["decode_tokens"] == 1_287_511 - 5000
    assert report["verification"]["failed"] == 0
    assert report["verification"]["checked"] > 5000


def test_the_page_about_replay_states_the_defaults():
    page = Path(__file__).parents[2].joinpath("docs", "replay.md").read_text().replace("\n", " ")
    assert f"`{CostModel()}`" in page
    for name in ("ARRIVALS_PER_SECOND", "PROMPT_MEDIAN", "PROMPT_SIGMA", "PROMPT_MAX", "OUTPUT_MEDIAN", "OUTPUT_SIGMA",
                 "OUTPUT_MAX", "NUM_REQUESTS"):  # fmt: skip
        assert f" {getattr(synthetic, name):g}" in page, name
