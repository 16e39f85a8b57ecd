"""One target under atheris: ``guided.py FILE:FUNCTION SECONDS``. What it finds, hypothesis tries first the next time.

The bytes of libFuzzer are the choices that hypothesis would make: a target is written once. The corpus is in .fuzz.
"""

import importlib
import pathlib
import sys

import atheris

ROOT = pathlib.Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / "tests")]


def main():
    file, function = sys.argv[1].split(":")
    with atheris.instrument_imports(include=["attncore"]):
        module = importlib.import_module(f"fuzz.{file}")
        from attncore.kernels import load_kernels

        for name in ("cython", "numba"):
            load_kernels(name)
    from fuzz.budget import limited_memory

    target = getattr(module, function)
    corpus = ROOT / ".fuzz" / f"{file}.{function}"
    corpus.mkdir(parents=True, exist_ok=True)
    options = [f"-max_total_time={sys.argv[2]}", f"-artifact_prefix={corpus.parent}/", "-timeout=60", "-rss_limit_mb=0"]
    atheris.Setup(
        [sys.argv[0], str(corpus), *options, "-max_len=8192", "-print_final_stats=1"], target.hypothesis.fuzz_one_input
    )
    with limited_memory():
        atheris.Fuzz()


if __name__ == "__main__":
    main()
