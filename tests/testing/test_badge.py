"""python -m attncore.testing.badge: a row and a badge of what the kit has written."""

import io
import json
import subprocess
import sys
from xml.etree import ElementTree

import pytest

from attncore.testing import badge

TABLE = {
    "backend": "acme", "distribution": "attn-acme", "version": "1.0", "attncore": "0.1.0", "device": "cpu",
    "device_name": "",
    "rows": [
        {"capability": "prefill", "state": "supported"},
        {"capability": "NaN canary", "state": "supported"},
        {"capability": "sinks", "state": "unsupported"},
    ],
}  # fmt: skip


@pytest.fixture
def written(tmp_path):
    def write(name="kit.json", **changes):
        (tmp_path / name).write_text(json.dumps({**TABLE, **changes}))
        return str(tmp_path / name)

    return write


def test_a_row_for_each_file(written, capsys):
    other = written("b.json", backend="b|c", device_name="A GPU", rows=[{"capability": "decode", "state": "failed"}])
    assert badge.main([written(options={"scores": "float64"}), other]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"| {' | '.join(badge.HEADERS)} |"
    assert lines[2] == "| acme (scores=float64) | attn-acme 1.0 | 0.1.0 | cpu | prefill, NaN canary | sinks | - |"
    assert lines[3] == r"| b\|c | attn-acme 1.0 | 0.1.0 | A GPU | - | - | decode |"
    assert {line.replace("\\|", "").count("|") for line in lines} == {len(badge.HEADERS) + 1}


@pytest.mark.parametrize(
    ("text", "cell"),
    [
        ("<script>alert(1)</script>", "&lt;script&gt;alert(1)&lt;/script&gt;"),
        ("[a](javascript:b)", r"\[a\](javascript:b)"),
        ("![a](http://b)", r"!\[a\](http://b)"),
        ("&lt;b>", "&amp;lt;b&gt;"),
        ("`a`", r"\`a\`"),
        ("**a** ~~b~~ _c_ __d__", r"\*\*a\*\* \~\~b\~\~ \_c\_ \_\_d\_\_"),
        ("a\\|b", r"a\\\|b"),
        ("a\\", r"a\\"),
        ("sliding_window", "sliding_window"),
        ("a\n| b\x1b[31m", r"a \| b\\x1b\[31m"),
    ],
)
@pytest.mark.parametrize("field", ["backend", "version", "device_name", "capability"])
def test_texts_are_no_markdown(written, capsys, field, text, cell):
    rows = [{"capability": text if field == "capability" else "decode", "state": "failed"}]
    assert badge.main([written(rows=rows, **({field: text} if field != "capability" else {}))]) == 0
    shown = capsys.readouterr().out.splitlines()
    assert len(shown) == 3
    assert cell in shown[2]


@pytest.mark.parametrize(
    ("states", "text", "color"),
    [
        (["supported", "supported", "unsupported"], "2 supported", "#2e7d32"),
        (["supported", "failed"], "1 failed", "#c62828"),
        (["supported", "not run", "expected failure"], "2 failed", "#c62828"),
        ([], "0 supported", "#c62828"),
    ],
)
def test_the_badge(written, tmp_path, capsys, states, text, color):
    rows = [{"capability": f"row {i}", "state": state} for i, state in enumerate(states)]
    assert badge.main([written(rows=rows, backend="<a&b>"), "--svg", str(tmp_path / "badge.svg")]) == 0
    root = ElementTree.fromstring((tmp_path / "badge.svg").read_text())
    assert [one.text for one in root.iter() if one.tag.endswith("text")] == [badge.LABEL, text]
    assert next(one.text for one in root.iter() if one.tag.endswith("title")) == f"attncore kit of <a&b>: {text}"
    assert [one.get("fill") for one in root.iter() if one.tag.endswith("rect")] == ["#555", color]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "kit.json is empty; write it by `python -m attncore.testing NAME --json`"),
        ("[1]", "[1] is no table of the kit; write it by `python -m attncore.testing NAME --json`"),
        (json.dumps({**TABLE, "version": 3}), "version: 3 is not a text"),
        (json.dumps({**TABLE, "rows": [{"state": "failed"}]}), "rows: "),
        ("[" * 100, "kit.json ends in the middle of a value, at column 100: it may be cut"),
    ],
)
def test_what_is_no_table_is_one_line(tmp_path, capsys, text, said):
    (tmp_path / "kit.json").write_text(text)
    assert badge.main([str(tmp_path / "kit.json"), "--svg", str(tmp_path / "x.svg")]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert said in err
    assert "kit.json" in err
    assert not (tmp_path / "x.svg").exists()


def test_mistakes_of_the_command_line(written, capsys):
    assert badge.main(["absent.json"]) == 2
    assert capsys.readouterr().err == "attncore: error: absent.json cannot be read: No such file or directory\n"
    assert badge.main([written(), "--svg", "/dev/full"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert "attncore: error: /dev/full cannot be written: " in err
    assert badge.main(["-", "-"]) == 2
    assert capsys.readouterr().err == "attncore: error: FILE: '-' is given twice, and standard input can be read once\n"
    assert badge.main([written(), written("b.json"), "--svg", "x.svg"]) == 2
    assert "--svg: a badge is of one FILE" in capsys.readouterr().err


def test_standard_input_and_a_process_without_torch(written):
    code = "import sys; sys.modules.update(torch=None, pytest=None); from attncore.testing.badge import main; "
    done = subprocess.run(
        [sys.executable, "-c", f"{code}raise SystemExit(main(['-']))"],
        input=json.dumps(TABLE), capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert "| acme | attn-acme 1.0 |" in done.stdout


def test_it_reads_what_the_kit_writes():
    """The fields that it needs are those of a report."""
    pytest.importorskip("pytest")
    from attncore.testing.harness.support_table import Report, Result

    report = Report("reference")
    report.add(Result("prefill", "test_prefill", "passed", ""))
    table = json.loads(json.dumps(report.as_json()))
    assert badge._problem(table) == ""
    assert badge.row(table)[:2] == ("reference", f"attncore {table['version']}")
    assert io.StringIO(badge.svg(table)).read().startswith("<svg")


@pytest.mark.parametrize("name", ["kit.json", "./kit.json", "link.json"])
def test_a_badge_is_not_written_over_what_it_is_made_of(written, tmp_path, monkeypatch, capsys, name):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "link.json").symlink_to(written())
    before = (tmp_path / "kit.json").read_bytes()
    assert badge.main(["kit.json", "--svg", name]) == 2
    assert capsys.readouterr() == ("", f"attncore: error: --svg: {name} is FILE itself; give another\n")
    assert (tmp_path / "kit.json").read_bytes() == before


def test_a_badge_is_not_written_over_standard_input_nor_among_the_rows(written, tmp_path):
    command = [sys.executable, "-m", "attncore.testing.badge", "-", "--svg"]
    for name, said in (("kit.json", "is FILE itself"), ("-", "is not written to"), ("/dev/stdout", "standard output")):
        with open(written(), "rb") as file:
            done = subprocess.run(
                [*command, name], stdin=file, capture_output=True, cwd=tmp_path, text=True, check=False
            )
        assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
        assert said in done.stderr
    assert [one.name for one in tmp_path.iterdir()] == ["kit.json"]
    assert json.loads((tmp_path / "kit.json").read_text()) == TABLE
