"""``make fuzz``: runs the targets of this folder again and again until the time is over, or one of them fails.

Two thirds of the time are rounds of hypothesis, each with new seeds. In the last third atheris, where it is installed,
runs each function among the targets guided by the lines of attncore that it reaches. Both continue where an earlier run
stopped: hypothesis keeps failing examples in .hypothesis, atheris its corpus in .fuzz.
"""

import argparse
import importlib.util
import pathlib
import re
import signal
import subprocess
import sys
import time

HERE = pathlib.Path(__file__).parent
GUIDED = re.compile(r"^@given\(.*\)\ndef (test_\w+)", re.MULTILINE)


def run_until(end, words):
    """The command's exit code, or 0 where the time is over first: it is then interrupted."""
    process = subprocess.Popen(words)
    try:
        return process.wait(max(0, end - time.monotonic()))
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()
        return 0


def rounds(end, jobs, paths):
    """Rounds of every target until the time is over; an exit code."""
    words = [sys.executable, "-m", "pytest", "-q", "-x", "-n", str(jobs), "--hypothesis-profile=fuzz", *paths]
    code = 0
    while code == 0 and time.monotonic() < end:
        code = run_until(end, words)
    return code


def targets(paths):
    """file:function of each target that is a function without parameters of pytest."""
    for path in map(pathlib.Path, paths):
        for file in sorted(path.glob("test_*.py")) if path.is_dir() else [path]:
            yield from (f"{file.stem}:{name}" for name in GUIDED.findall(file.read_text()))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("paths", nargs="*", default=[str(HERE)])
    args = parser.parse_args()
    start, seconds = time.monotonic(), 60 * args.minutes
    guided = list(targets(args.paths)) if importlib.util.find_spec("atheris") else []
    if not guided:
        print("fuzz: hypothesis alone; atheris is not installed")
    share = seconds / 3 / len(guided) if guided else 0
    code = rounds(start + seconds - share * len(guided), args.jobs, args.paths)
    for target in guided:
        code = code or subprocess.call([sys.executable, str(HERE / "guided.py"), target, str(max(1, int(share)))])
    print(f"fuzz: {'a target failed' if code else 'nothing found'} in {(time.monotonic() - start) / 60:.1f} minutes")
    return code


if __name__ == "__main__":
    sys.exit(main())
