"""What a command prints on terminals of several widths and in a pipe: what holds of every screen."""

import re
import sys

import pytest

from attncore.cli import main

WIDTHS = (60, 80, 200)


class Screen:
    """Runs a command in this process, on a terminal of some columns or (None) in a pipe."""

    def __init__(self, capsys, monkeypatch):
        self.capsys, self.monkeypatch = capsys, monkeypatch

    def __call__(self, *words, width=None):
        with self.monkeypatch.context() as patch:
            if width is not None:
                patch.setenv("COLUMNS", str(width))
                patch.setattr(sys.stdout, "isatty", lambda: True)
                patch.setattr(sys.stderr, "isatty", lambda: True)
            code = main([*words])
        out, err = self.capsys.readouterr()
        assert "Traceback" not in out + err
        assert "\x1b" not in out + err
        assert re.findall(r"[ \t]$", out + err, re.MULTILINE) == []
        # What is there to be copied is not broken.
        lines = [line for line in (out + err).splitlines() if not line.lstrip().startswith(("pip install ", "{"))]
        too_wide = [line for line in lines if width is not None and len(line) > width]
        assert too_wide == []
        return code, out, err


@pytest.fixture
def screen(site, capsys, monkeypatch):
    """A Screen; of plugins those that are planted are installed."""
    return Screen(capsys, monkeypatch)
