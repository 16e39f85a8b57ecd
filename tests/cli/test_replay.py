"""attncore replay, as its user meets it."""

import json
import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest
from replay_command import ran, reported

from attncore.cli import main
from attncore.how_to_install import install_extra
from attncore.replay import rank_builders
from attncore.replay.layers.attention_layers import AttentionLayers
from attncore.replay.scheduling.cost_model import CostModel
from attncore.replay.traces import synthetic

TIMES = ("build_us", "attention_us", "build_histogram", "wall_s")
SMALL = ["--num-heads", "2", "--num-kv-heads", "1", "--head-size", "8", "--layers", "1"]
TRACES = Path(__file__).parents[3] / "shared" / "traces"


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
    for times in (*report["build_us"].values(), report["attention_us"]):
        assert list(times) == ["p50", "p90", "p99", "max"]
        assert 0 < times["p50"] <= times["p90"] <= times["p99"] <= times["max"]
    assert report["plan_us"] is None  # the reference plans nothing
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


def test_a_name_of_a_trace_sends_a_terminal_nothing(capsys, trace, tmp_path):
    odd = tmp_path / "t\x1b[31m.csv"
    odd.write_bytes(Path(trace).read_bytes())
    assert main(["replay", str(odd), "--metadata-only"]) == 0
    out = capsys.readouterr().out
    assert "\x1b" not in out
    assert "t\\x1b[31m.csv (" in out


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


def test_a_failed_check_ends_with_1_and_names_the_field(capsys, trace, monkeypatch):
    class Faulty(rank_builders.MetadataBuilder):
        def build(self, scheduled):
            metadata = super().build(scheduled)
            metadata.host._own("logits_indices")[0] += 1
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
    assert f"torch is not installed: {install_extra('torch')}, or" in err
    assert "--metadata-only" in err
    assert err.count("\n") == 1


def test_an_unknown_backend_ends_with_3(capsys, trace):
    pytest.importorskip("torch")
    code, out, err = ran(capsys, trace, "--backend", "nonesuch")
    assert (code, out) == (3, "")
    assert "nonesuch" in err


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
