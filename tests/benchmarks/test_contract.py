"""What choosing a backend costs: the import, the command, the choice."""

import os
import statistics
import subprocess
import sys

from planting import site

import attncore

__all__ = ["site"]
REQUEST = {"num_heads": 32, "num_kv_heads": 8, "head_size": 128, "dtype": "bfloat16"}


def named(benchmark, what):
    benchmark.group = what
    benchmark.extra_info["way"] = "attncore"


def with_bytecode(folder, **more):
    """The environment of a process that finds its modules compiled, as pip leaves them; ``folder`` keeps them.

    A variable of the shell's may forbid bytecode: each process would then compile 200 modules, 60 ms that no
    installation pays.
    """
    environment = {**os.environ, "PYTHONPYCACHEPREFIX": str(folder), **more}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    return environment


def plant(site, count):
    for index in range(count):
        site.plugin(f"planted{index}")


def test_select_among_ten(benchmark, site):
    plant(site, 9)  # and the reference backend
    assert len(attncore.select(**REQUEST).reasons) >= 0
    named(benchmark, "select among ten")
    host = attncore.Host.assume("cpu")
    benchmark.pedantic(lambda: attncore.select(host=host, **REQUEST), rounds=200, warmup_rounds=5)


def test_list_with_three_plugins(benchmark, site, tmp_path):
    plant(site, 3)
    environment = with_bytecode(tmp_path, PYTHONPATH=str(site.folder))
    words = [sys.executable, "-P", "-m", "attncore", "list"]
    assert "planted2" in subprocess.run(words, env=environment, capture_output=True, text=True, check=True).stdout
    named(benchmark, "attncore list")
    benchmark.pedantic(
        lambda: subprocess.run(words, env=environment, capture_output=True, check=True), rounds=11, warmup_rounds=1
    )


def test_import(benchmark, tmp_path):
    """Whole processes are timed; what attncore adds to NumPy is timed inside each, milliseconds, in extra_info."""
    program = "import time, numpy; t = time.perf_counter(); import attncore; print(time.perf_counter() - t)"
    added = []
    words, environment = [sys.executable, "-P", "-c", program], with_bytecode(tmp_path)

    def start():
        done = subprocess.run(words, env=environment, capture_output=True, text=True, check=True)
        added.append(float(done.stdout) * 1000)

    named(benchmark, "import")
    benchmark.pedantic(start, rounds=21, warmup_rounds=2)
    benchmark.extra_info["added_ms"] = round(statistics.median(added), 2)
