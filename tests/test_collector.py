"""The garbage collector of a process that runs one command."""

import gc
import subprocess
import sys

import pytest

from attncore.cli import main

CYCLE = """
import atexit
class Knot:
    def __init__(self):
        self.me = self
    def __del__(self):
        print("gone")
print("said at its end:", flush=True)
knot = Knot()
del knot
atexit.register(print, "by atexit")
"""


@pytest.mark.parametrize("how", ["", "from attncore.collector import end_without_search; end_without_search()\n"])
def test_what_stands_in_a_cycle_is_not_told_that_the_process_ends(how):
    done = subprocess.run([sys.executable, "-c", how + CYCLE], check=True, capture_output=True, text=True)
    assert done.stdout.splitlines()[1:] == ["by atexit", *([] if how else ["gone"])]


def test_a_command_that_is_called_leaves_the_collector_as_it_was(capsys):
    before = gc.isenabled(), gc.get_freeze_count()
    assert main(["list"]) == 0
    assert (gc.isenabled(), gc.get_freeze_count()) == before
