"""``--option NAME=VALUE`` of explain, verify, replay, bench and the kit: options of a backend, as it declares them."""

import json

import pytest

from attncore.cli import main
from attncore.testing.__main__ import main as kit

LIGHT = """
from attncore import BackendSpec, MultipleOf, Option, hookimpl
from attncore.builder.fields import ARRAYS

@hookimpl
def attncore_backend():
    return BackendSpec(
        name="keen", api=1, factory="attn_keen_heavy:Backend", devices={"any": 5}, dtypes={"float32", "bfloat16"},
        head_sizes=MultipleOf(8), block_sizes=MultipleOf(4), features={"lse", "sliding_window"},
        host_needs=ARRAYS, device_needs=ARRAYS, host_lengths="exact",
        options={
            "split": Option(int, "parts of a long context", default=1),
            "exact": Option(bool, "sums in float32", default=True),
            "factor": Option(float, "what the output is multiplied by", default=1.0),
            "kernel": Option(str, "which kernel", default="plain", choices=("plain", "paged")),
        },
        check=lambda request, host: (
            ["kernel paged has no split"]
            if request.options.get("keen", {}).get("kernel") == "paged" and request.options["keen"].get("split") else ()
        ),
    )
"""
HEAVY = """
from attncore.reference import ReferenceBackend, ReferenceImpl

class Impl(ReferenceImpl):
    def forward(self, *given, **named):
        return super().forward(*given, **named).mul_(self.backend.config.options["factor"])

class Backend(ReferenceBackend):
    impl_class = Impl

    def __init__(self, config):
        super().__init__(config)
        kinds = {name: type(value) for name, value in config.options.items()}
        assert kinds == {"split": int, "exact": bool, "factor": float, "kernel": str}, kinds
"""
SMALL = ["--num-heads", "4", "--num-kv-heads", "2"]
COMMANDS = {
    "explain": lambda *words: main(["explain", "--backend", "keen", *words]),
    "verify": lambda *words: main(["verify", "keen", *SMALL, "--dtype", "float32", *words]),
    "replay": lambda *words: main(["replay", "--backend", "keen", "--requests", "1", "--minutes", "1", *words]),
    "bench": lambda *words: main(["bench", "keen", "--seconds", "0.001", "--passes", "3", *words]),
    "kit": lambda *words: kit(["keen", "--examples", "1", "-k", "test_decode", *words]),
}


@pytest.fixture
def keen(site, monkeypatch, tmp_path):
    """A backend with an option of each type; the verdicts and runs of this test alone."""
    pytest.importorskip("torch")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    site.plugin("keen", LIGHT, heavy=HEAVY)
    return site


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("splti=2", "'splti' is not declared by keen; declared: exact, factor, kernel, split; did you mean split?"),
        ("split=two", "'split': 'two' is not an int"),
        ("exact=1", "'exact': '1' is not a bool"),
        ("factor=x", "'factor': 'x' is not a float"),
        ("kernel=plan", "'kernel': 'plan' is not one of 'plain', 'paged'; did you mean plain?"),
        ("split", "'split' is not NAME=VALUE"),
        ("=2", "'=2' is not NAME=VALUE"),
    ],
)
def test_a_mistake_is_named_before_anything_runs(keen, capsys, command, word, said):
    assert COMMANDS[command]("--option", word) == 2
    output = capsys.readouterr()
    assert (output.out, output.err) == ("", f"attncore: error: --option: {said}\n")


def test_an_option_given_twice_and_one_of_no_backend(keen, capsys):
    assert COMMANDS["explain"]("--option", "split=2", "--option", "split=3") == 2
    assert capsys.readouterr().err == "attncore: error: --option: 'split' is given twice; give one value\n"
    assert main(["explain", "--option", "split=2"]) == 2
    assert "--option: 'split=2' given without --backend; " in capsys.readouterr().err
    assert main(["verify", "--all", "--option", "split=2"]) == 2
    assert "--option: 'split=2' given without NAME; " in capsys.readouterr().err


def test_explain_asks_with_the_options_of_their_types(keen, capsys):
    words = ["--option", "split=2", "--option", "exact=FALSE", "--option", "factor=2", "--json"]
    assert COMMANDS["explain"](*words) == 0
    asked = json.loads(capsys.readouterr().out)["request"]["options"]
    assert asked == {"keen": {"split": 2, "exact": False, "factor": 2.0}}
    assert COMMANDS["explain"]("--option", "kernel=paged", "--option", "split=2") == 3
    assert "kernel paged has no split" in capsys.readouterr().out


def test_verify_keeps_a_verdict_for_each_set_of_options(keen, capsys):
    def state(*words):
        COMMANDS["verify"](*words, "--json")
        (verdict,) = json.loads(capsys.readouterr().out)
        return verdict["state"], verdict["cached"]

    assert state() == ("agrees", False)
    assert state("--option", "factor=1.5") == ("differs", False)
    assert state("--option", "factor=1.5") == ("differs", True)
    assert state() == ("agrees", True)


def test_replay_runs_with_the_options_and_reports_them(keen, capsys):
    assert COMMANDS["replay"]("--json") == 0
    assert "option" not in json.loads(capsys.readouterr().out)["options"]
    assert COMMANDS["replay"]("--option", "factor=1.5", "--json") == 1
    assert json.loads(capsys.readouterr().out)["options"]["option"] == "factor=1.5"


def test_bench_keeps_runs_of_other_options_apart(keen, capsys):
    assert COMMANDS["bench"]("--option", "split=3", "--json") == 0
    assert json.loads(capsys.readouterr().out)["config"]["options"] == {"split": 3}
    assert COMMANDS["bench"]("--json") == 0
    assert "options" not in json.loads(capsys.readouterr().out)["config"]


def test_the_kit_runs_with_the_options_and_its_table_names_them(keen, capsys):
    assert COMMANDS["kit"]("--json") == 0
    assert json.loads(capsys.readouterr().out)["options"] == {}
    assert COMMANDS["kit"]("--option", "factor=1.5", "--json") == 1
    table = json.loads(capsys.readouterr().out)
    assert table["options"] == {"factor": 1.5}
    assert table["failures"][0]["test"] == "test_decode"


def test_ranks_of_any_backend_that_has_lse(keen, capsys):
    """Each token is a row of one query, so that a backend which decodes and gives its log-sum-exp is enough."""
    assert COMMANDS["replay"]("--context-parallel", "2:4", "--verify-every", "1", "--json") == 0
    report = json.loads(capsys.readouterr().out)
    assert report["backend"] == "keen"
    assert report["verification"]["checked"] > 2
    assert report["verification"]["failed"] == 0
    wrong = (
        HEAVY
        + """
def wrong(self, *given, **named):
    output, lse = ReferenceImpl.forward_with_lse(self, *given, **named)
    return output, lse / 0.6931471805599453
Impl.forward_with_lse = wrong
"""
    )
    keen.plugin("wrong", LIGHT.replace("keen", "wrong"), heavy=wrong)
    assert main(["replay", "--backend", "wrong", "--requests", "1", "--context-parallel", "2", "--json"]) == 1


def test_ranks_of_a_backend_without_lse_are_refused_with_the_reason(site, capsys):
    site.plugin("plain")
    assert main(["replay", "--backend", "plain", "--head-size", "64", "--context-parallel", "2"]) == 3
    assert "lse" in capsys.readouterr().err


@pytest.mark.parametrize("value", ["nan", "inf", "-inf", "1e999"])
@pytest.mark.parametrize("command", COMMANDS)
def test_a_number_is_finite(keen, capsys, command, value):
    """The reports are JSON, which has no other."""
    assert COMMANDS[command]("--option", f"factor={value}", "--json") == 2
    out, err = capsys.readouterr()
    assert (out, err) == ("", f"attncore: error: --option: 'factor': '{value}' is not a finite number\n")


@pytest.mark.parametrize("value", ["nan", "inf"])
def test_a_default_is_finite(site, capsys, value):
    light = LIGHT.replace("default=1.0", f"default=float({value!r})").replace("keen", "boundless")
    site.plugin("boundless", light)
    assert main(["show", "boundless", "--json"]) == 1
    (reason,) = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)["reasons"]
    assert f"default: {value} is not a finite number" in reason["message"]
