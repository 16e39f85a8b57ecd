"""What a newcomer sees: every command with --help, with a mistake, without a library, on terminals of three widths.

A screen has no line that is wider than the terminal, no traceback and no colour, and the exit code that it should; a
mistake is one short message, and in a pipe one line.
"""

import argparse
import fcntl
import importlib
import importlib.util
import os
import pty
import re
import struct
import subprocess
import sys
import termios

import pytest
from cli.screens import WIDTHS
from planting import SPEC

from attncore.cli import COMMANDS, _parser, main
from attncore.cli.output import columns
from attncore.how_to_install import install_distribution

NEEDED = {"verify": [], "bench": ["NAME"], "new-backend": ["NAME", "DIR"]}
LONG = "acme-attention-kernels"


@pytest.mark.parametrize("width", [None, *WIDTHS])
@pytest.mark.parametrize("command", COMMANDS)
def test_help_fits_and_every_option_has_a_text(screen, command, width):
    code, out, err = screen(command, "--help", width=width)
    assert (code, err) == (0, "")
    assert out.startswith(f"usage: attncore {command} [OPTION ...]")
    assert screen("help", command, width=width) == (code, out, err)
    for action in _parser(command)._actions:
        assert action.help, action.option_strings
        assert action.help is not argparse.SUPPRESS


@pytest.mark.parametrize("width", [None, *WIDTHS])
def test_the_commands_fit(screen, width):
    code, out, err = screen("--help", width=width)
    assert (code, err) == (0, "")
    assert [command for command in COMMANDS if f"\n  {command} " in out] == [*COMMANDS]
    for words in (["-h"], ["help"], ["help", "help"]):
        assert screen(*words, width=width) == (0, out, "")
    assert screen(width=width) == (2, out, "")
    assert max(map(len, out.splitlines())) <= (width or 80)


@pytest.mark.parametrize("width", WIDTHS)
def test_the_line_that_help_shows_can_be_copied(screen, tmp_path, width):
    """It is one line of JSON Lines: broken at the terminal's width it would be two bad ones."""
    _, out, _ = screen("build", "--help", width=width)
    (line,) = [one for one in out.splitlines() if one.startswith("{")]
    (tmp_path / "copied").write_text(line)
    code, answer, err = screen("build", str(tmp_path / "copied"))
    assert (code, err) == (0, "")
    assert '"slot_mapping": [16, 17, 18, 19, 24]' in answer


def test_arguments_that_are_missing_are_named(screen):
    for words, said in (
        ([], "NAME, DIR: none given; attncore new-backend --help says what they are"),
        (["a"], "DIR: none given; it is where to write the repository"),
    ):
        assert screen("new-backend", *words) == (2, "", f"attncore: error: {said}\n")


@pytest.mark.parametrize("width", [None, *WIDTHS])
def test_what_was_written_fits(screen, tmp_path, monkeypatch, width):
    monkeypatch.chdir(tmp_path)
    code, out, _ = screen("new-backend", "acme", "repository", width=width)
    assert code == 0
    assert "the backend acme, which works already" in " ".join(out.split())


def test_the_version_has_three_names(screen):
    assert screen("-V") == screen("--version") == screen("version")
    assert re.fullmatch(r"attncore \d+\.\d+\.\d+\n", screen("-V")[1])


@pytest.mark.parametrize(
    ("word", "hint"),
    [("--verison", "did you mean --version?"), ("--helpp", "did you mean --help?"), ("-x", "attncore --help lists")],
)
def test_a_misspelt_option_of_attncore_is_guessed(screen, word, hint):
    code, out, err = screen(word)
    assert (code, out) == (2, "")
    assert err.startswith(f"attncore: error: command: '{word}' is neither a command nor an option; {hint}")


@pytest.mark.parametrize("width", WIDTHS)
def test_a_command_to_copy_is_on_one_line(site, screen, width):
    """Plugins that are not installed come with one, which two of three widths have no room for beside the rest."""
    _, out, _ = screen("explain", "--assume", "sm_90", width=width)
    lines = [" ".join(line.split()) for line in out.splitlines() if "pip install" in line]
    for name in ("flash", "flashinfer", "rocm"):
        command = install_distribution(f"attn-{name}")
        assert any(command in line for line in lines), out


@pytest.mark.parametrize("words", [["-v"], ["hlep"], ["lst"], ["help", "lst"], ["x" * 300]])
def test_a_command_that_is_none(screen, words):
    code, out, err = screen(*words)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert err.startswith(f"attncore: error: command: '{words[-1][:20]}")
    assert ("did you mean list?" in err) == ("lst" in words)
    screen(*words, width=200 if len(words[0]) < 100 else None)


@pytest.mark.parametrize("width", [None, 60])
@pytest.mark.parametrize("command", COMMANDS)
def test_a_wrong_option(screen, command, width):
    code, out, err = screen(command, *NEEDED.get(command, []), "--jsonn", width=width)
    assert (code, out) == (2, "")
    assert err.startswith("attncore: error: unrecognized arguments: --jsonn; ")
    hint = f"attncore {command} --help lists the options" if command == "build" else "did you mean --json?"
    assert hint in " ".join(err.split())
    assert width is not None or err.count("\n") == 1


@pytest.mark.parametrize(
    "words",
    [
        ["build", "--layout", "x"],
        ["explain", "--head-size", "x"],
        ["explain", "--dtype", "int8"],
        ["verify", "--kv-cache-dtype", "int8"],
        ["replay", "--requests", "0"],
        ["bench", "reference", "--passes", "1"],
        ["doctor", "--timeout", "0"],
    ],
)
def test_a_wrong_value_begins_with_its_option(screen, words):
    code, out, err = screen(*words)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert err.startswith(f"attncore: error: {words[-2]}: ")
    assert screen(*words, width=60)[0] == 2


@pytest.mark.parametrize(
    ("words", "name"),
    [
        (["build", "{}"], ""),
        (["replay", "--metadata-only", "{}"], ""),
        (["explain", "--config", "{}"], "--config: "),
        (["bench", "reference", "--steps", "{}"], "--steps: "),
    ],
)
def test_a_file_that_is_missing_is_told_in_one_way(screen, words, name):
    code, out, err = screen(*(word.format("absent.json") for word in words))
    assert (code, out) == (2, "")
    assert err == f"attncore: error: {name}absent.json cannot be read: No such file or directory\n"


@pytest.mark.parametrize("width", [None, *WIDTHS])
def test_the_list_can_be_read(site, screen, width):
    site.plugin("acme", distribution=LONG, extra="requires=('numpy>=99',)")
    site.plugin("fails", "raise RuntimeError('no licence file in ' + ', '.join(['any of its folders'] * 20))")
    site.plugin("good")
    code, out, err = screen("list", width=width)
    table, _, lacking = out.partition("\nnot installed: ")
    assert " ".join(lacking.split()) == "flash, flashinfer, rocm; attncore explain says how"
    lines = table.splitlines()
    assert (code, err) == (0, "")
    rows = {line.split()[0]: line.split()[1:5] for line in lines if not line.startswith(" ")}
    assert rows["acme"] == [LONG, "1.0", "loaded", "no"]
    assert rows["fails"] == ["attn-fails", "1.0", "broken", "no"]
    assert rows["good"] == ["attn-good", "1.0", "loaded", "yes"]
    said = " ".join(out.split())
    assert f"is installed; {LONG} 1.0 needs numpy>=99; pip install 'numpy>=99'" in said
    assert "no licence file in any of its folders, any of its folders" in said
    assert len(rows) == 5
    assert width is not None or len(lines) == len(rows)


@pytest.mark.parametrize("width", [None, *WIDTHS])
def test_the_doctors_report_can_be_read(site, screen, width):
    site.plugin("acme", distribution=LONG, extra="requires=('numpy>=99',)")
    code, out, err = screen("doctor", "--no-create", width=width)
    assert (code, re.sub(r"checking \w+ \.\.\.\r +\r", "", err)) == (1, "")
    said = " ".join(out.split())
    assert f"finding: acme ({LONG} 1.0): cannot run here: numpy " in said
    assert said.count("pip install 'numpy>=99'") == 2  # of the row, and of the finding


@pytest.mark.parametrize("width", [None, *WIDTHS])
@pytest.mark.parametrize("command", ["explain", "verify", "replay"])
def test_a_refusal_has_lines_and_the_one_named_first(site, screen, command, width):
    for number in range(3):
        site.plugin(f"acme{number}", extra=f"requires=({', '.join(repr(f'library-{n}') for n in range(4))},)")
    words = {"verify": ["verify", "acme2"]}.get(command, [command, "--backend", "acme2"])
    code, out, err = screen(*words, width=width)
    lines = [line for line in (err or out).splitlines() if line.startswith(("attncore", "acme", "reference"))]
    first = 0 if command == "explain" else 1
    assert code == 3
    assert lines[first].startswith("acme2 (attn-acme2 1.0): ")
    # explain says why each other is not used, a command that was told to use one says why not that one
    assert [line.split()[0] for line in lines[first + 1 :]][:1] == (["reference"] if command == "explain" else [])
    said = " ".join((out + err).split())
    asked_by = {"explain": "backend", "verify": "NAME", "replay": "--backend"}[command]
    named = ", named by the request," if command == "explain" else ""  # the option that names it is said already
    assert f"{asked_by}: 'acme2'{named} cannot be used on " in said
    assert "pip install library-3" in said
    assert max(map(len, (out + err).splitlines())) < 200


@pytest.mark.parametrize("words", [["verify", "refrence"], ["replay", "--backend", "refrence"], ["bench", "refrence"]])
def test_a_misspelt_backend_is_guessed_at_once(screen, words):
    code, out, err = screen(*words)
    assert (code, out) == (3, "")
    assert "did you mean reference?" in "".join(err.splitlines()[:2])


@pytest.mark.parametrize("words", [["verify"], ["replay", "--backend"], ["bench"]])
def test_a_backend_for_other_devices_is_one_line_without_sizes(site, screen, words):
    source = SPEC.format(name="far", module="attn_far", extra="")
    source = source.replace("MultipleOf(16)", "{256}").replace('"any"', '"cuda:sm_90"')
    site.plugin("far", source)
    code, out, err = screen(*words, "far")
    assert (code, out) == (3, "")
    said = " ".join(err.split())
    assert said.endswith("'far' cannot be used here: device cpu not supported by attn-far 1.0; supported: cuda:sm_90")
    assert "block" not in said


def test_a_misspelt_name_that_is_excluded_is_told(screen, caplog):
    code, out, _ = screen("explain", "--exclude", "refrence", width=80)
    assert code == 0
    assert "correct the name (did you mean reference?)" in " ".join(out.split())
    caplog.clear()
    import attncore

    fields = {
        "num_heads": 1,
        "num_kv_heads": 1,
        "head_size": 1,
        "dtype": "float32",
        "host": attncore.Host.assume("cpu"),
    }
    with pytest.warns(UserWarning, match=r"^exclude: refrence: .* \(did you mean reference\?\)") as told:
        attncore.select(**fields, exclude=["refrence"])
    assert [one.filename for one in told] == [__file__]
    assert [one.getMessage()[:10] for one in caplog.records if one.levelname == "WARNING"] == ["refrence: "]
    caplog.clear()
    attncore.select(**fields, exclude=["of-another-machine", "flash"])
    assert [one for one in caplog.records if one.levelname == "WARNING"] == []


@pytest.fixture
def no_torch(site, monkeypatch):
    """No torch for who asks whether it is there; for who reads its metadata one that is too old."""
    (info := site.folder / "torch-2.1.dist-info").mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: torch\nVersion: 2.1\n")
    found = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *more: None if name == "torch" else found(name, *more)
    )


@pytest.mark.parametrize("width", [None, *WIDTHS])
@pytest.mark.parametrize(
    ("words", "code"),
    [
        (["list"], 0),
        (["explain"], 3),
        (["verify"], 3),
        (["verify", "--all"], 3),
        (["replay"], 3),
        (["bench", "reference"], 3),
    ],
    ids=lambda words: "-".join(words) if isinstance(words, list) else "",
)
def test_without_torch_it_says_what_to_install(no_torch, screen, words, code, width):
    found, out, err = screen(*words, width=width)
    assert found == code
    assert re.search(r"pip install '?(torch>=2.7|attncore\[torch\])", " ".join((out + err).split()))


def test_a_command_without_torch_that_needs_none(no_torch, screen):
    assert screen("replay", "--metadata-only", "--requests", "3")[0] == 0


def sized(columns_of_it):
    """A pseudo-terminal: its two ends."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns_of_it, 0, 0))
    return ours, theirs


def read_all(descriptor):
    found = b""
    while True:
        try:
            part = os.read(descriptor, 1 << 16)
        except OSError:  # the other end is closed
            part = b""
        if not part:
            return found.decode().replace("\r\n", "\n")
        found += part


def test_the_width_is_that_of_the_stream(monkeypatch):
    """And not of standard output, where that is another."""
    monkeypatch.delenv("COLUMNS", raising=False)
    ours, theirs = sized(73)
    with open(theirs, "w") as stream:
        assert columns(stream) == 73
        monkeypatch.setenv("COLUMNS", "91")
        assert columns(stream) == 91
        monkeypatch.setenv("COLUMNS", "many")
        assert columns(stream) == 73
    os.close(ours)
    with open(os.devnull, "w") as stream:
        assert columns(stream) is None


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["list"], 0, "reference "),
        (["list", "--help"], 0, "usage: attncore list "),
        (["explain", "--backend", "refrence"], 3, "did you mean reference?"),
        (["build"], 2, "attncore build: reading standard input, a batch (JSON) a line"),
        (["replay", "-"], 2, "attncore replay: reading standard input, a trace of requests; Ctrl-D ends it"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, list) else "",
)
def test_on_a_terminal_of_its_own(words, code, said, monkeypatch):
    monkeypatch.delenv("COLUMNS", raising=False)
    monkeypatch.setenv("ATTNCORE_PLUGINS", "reference")
    ours, theirs = sized(60)
    if words[0] in ("build", "replay"):
        os.write(ours, b"\x04")  # Ctrl-D, once
    streams = {"stdin": theirs, "stdout": theirs, "stderr": theirs}
    with subprocess.Popen([sys.executable, "-m", "attncore", *words], **streams) as process:
        os.close(theirs)
        found = read_all(ours)
    os.close(ours)
    assert process.returncode == code, found
    assert said in " ".join(found.replace("^D\b\b", "").split())
    assert max(map(len, found.splitlines())) <= 60


@pytest.mark.parametrize(("stated", "width"), [("50", 50), ("many", 80), ("", 80)])
def test_help_is_wrapped_in_a_pipe_too(stated, width, capsys, monkeypatch):
    """Nobody reads it line by line with a tool."""
    monkeypatch.setenv("COLUMNS", stated)
    for words in (["--help"], ["explain", "--help"]):
        main(words)
        longest = max(map(len, capsys.readouterr().out.splitlines()))
        assert width - 15 < longest <= width


@pytest.mark.parametrize("words", [["doctor", "--no-create"], ["verify", "reference"]])
def test_what_takes_seconds_says_so_on_a_terminal_and_nowhere_else(site, screen, words):
    code, _, err = screen(*words, width=80)
    line, _, rest = err.partition("\r")
    assert line == {"doctor": "checking reference ...", "verify": "verifying reference ..."}[words[0]], code
    assert rest == " " * len(line) + "\r"
    assert screen(*words)[2] == ""
