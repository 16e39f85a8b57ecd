"""The tests of ``under_device``, each file in a process of its own.

Triton's interpreter has to be asked for before Triton is imported, and a backend for a developer's device must not be
seen by other tests.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

FOLDER = Path(__file__).parent / "under_device"
SLOW_THERE = (
    "usual or smallest_and_largest or many_requests or log_sum_exp_with or captured_sizes or captured_drafts or "
    "torch_operator or every_method or long_contexts_with or captured_prompts_in or captured_prompts_over or "
    "captured_prompts_with_a or latent_captured_prompts or long_rows or long_encoders"
)
"""Tests of the kit over many sizes and steps: left to the slow tests, and to a GPU."""
HALF = "window or log_sum or rank or cross or encoder or list_ or graph or smaller"


def run(file, device, *options, **environ):
    """Run the tests of a file; the last line of what pytest says."""
    variables = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST", "ATTNCORE"))}
    variables |= {"ATTNCORE_ROCM_DEV_DEVICE": device, "ATTNCORE_KERNELS": os.environ.get("ATTNCORE_KERNELS", "")}
    variables |= {"TRITON_INTERPRET": "1"} if device == "cpu" else {}
    variables = {name: value for name, value in {**variables, **environ}.items() if value}
    command = [sys.executable, "-P", "-m", "pytest", str(FOLDER / file), "-q", "-p", "no:cacheprovider", *options]
    done = subprocess.run(command, capture_output=True, text=True, env=variables, cwd=FOLDER, check=False)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed, done.stdout[-2000:]
    return int(passed.group(1))


def test_kernels_in_the_interpreter():
    assert run("test_kernels.py", "cpu") >= 30


def test_cache_write_in_the_interpreter():
    assert run("test_cache_write.py", "cpu") == 13


def test_adopted_steps_in_the_interpreter():
    assert run("test_adopted_steps.py", "cpu") == 11


def test_adopted_steps_over_torch():
    assert run("test_adopted_steps.py", "cpu", "-k", "eager and not captured", ATTNCORE_ROCM_KERNEL="sdpa") == 6


def test_contexts_in_chunks_in_the_interpreter():
    assert run("test_contexts_in_chunks.py", "cpu") == 2


def test_cross_steps_in_the_interpreter():
    assert run("test_cross_steps.py", "cpu") == 6


@pytest.mark.parametrize("part", [f"({HALF})", f"not ({HALF})"], ids=["one half", "the other"])
def test_the_kit_in_the_interpreter(part):
    assert run("test_conformance.py", "cpu", "-k", f"{part} and not ({SLOW_THERE})") >= 40


def test_the_kit_over_torch():
    assert run("test_conformance.py", "cpu", ATTNCORE_ROCM_KERNEL="sdpa") >= 60


@pytest.mark.slow
def test_the_whole_kit_in_the_interpreter():
    assert run("test_conformance.py", "cpu", ATTN_ROCM_EXAMPLES="4") >= 100


@pytest.mark.gpu
def test_the_kit_as_an_engine_has_the_backend():
    """Without any variable: what a machine with this GPU and no other plugin uses."""
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST", "ATTNCORE"))}
    done = subprocess.run(
        [sys.executable, "-P", "-m", "attncore.testing", "rocm"], capture_output=True, text=True, env=kept, check=False
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]


@pytest.mark.gpu
@pytest.mark.parametrize("file", ["test_kernels.py", "test_cache_write.py", "test_conformance.py"])
def test_on_a_cuda_device(file):
    """The same kernels, compiled for the CUDA device that is there."""
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    assert run(file, "cuda") >= 6
