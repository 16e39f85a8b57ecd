"""What layers compute over random steps, however a step is handed over: dense float64 attention.

Each program draws a backend's sizes, groups of layers and of states, caches of any form, requests that come, go and
share prefixes, and then steps: whole, in views of views, slices, cuts, from another process, adopted, of the list
builder, in chunks of local attention, without a cache, padded for captured sizes, ahead and overlapped, with drafts,
trees, spans and encoders, by every method of a layer and the operator; and results that are merged from parts, of
contexts in chunks, cascades and ranks. Some seeds have programs of the list builder's steps, padded and advanced, or of
adopted ones; and there are models whose groups run on several backends.
"""

import gc
import os
import subprocess
import sys
from pathlib import Path

import pytest
from fuzz.budget import examples
from fuzz.layers import backends
from fuzz.layers.programs import new_program
from hypothesis import given
from hypothesis import strategies as st

STEPS = 10
TESTS = Path(__file__).parents[1]
seeds = st.integers(0, 2**32 - 1)


def run(seed, tested):
    new_program(seed, tested).run(STEPS)
    gc.collect()  # caches and workspaces of many megabytes, in cycles of few objects


@pytest.mark.parametrize("by_hand", [False, True], ids=["selected", "by hand"])
@examples(5)
@given(seed=seeds)
def test_reference(by_hand, seed):
    run(seed, backends.reference(by_hand=by_hand))


@pytest.fixture
def patch(tmp_path):
    """For a plugin's stand-in; what was found on this machine is not read."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path))
        yield patch


@pytest.mark.parametrize("generation", ["2", "3", "3_vllm", "4"])
@examples(2)
@given(seed=seeds)
def test_flash(patch, generation, seed):
    run(seed, backends.flash(generation, patch))


@examples(5)
@given(seed=seeds)
def test_flashinfer(seed):
    run(seed, backends.flashinfer())


@examples(4)
@given(seed=seeds)
def test_latent_flash(patch, seed):
    run(seed, backends.flash("3_vllm", patch, latent=True))


@examples(4)
@given(seed=seeds)
def test_latent_flashinfer(seed):
    run(seed, backends.flashinfer(latent=True))


@pytest.mark.parametrize("variant", ["ck", "aiter", "aiter_paged"])
@examples(3)
@given(seed=seeds)
def test_rocm(patch, variant, seed):
    run(seed, backends.rocm(variant, patch))


@pytest.mark.parametrize("kernel", ["xqa", "xqa_built", "cuda_cores"])
@pytest.mark.parametrize("cascade", [False, True])
@examples(1)
@given(seed=seeds)
def test_flashinfer_by_other_kernels(kernel, cascade, seed):
    run(seed, backends.flashinfer_by(kernel, cascade=cascade))


@pytest.mark.parametrize(
    "kinds",
    [("reference", "3_vllm", "flashinfer"), ("3_vllm", "latent"), ("2", "flashinfer"), ("3_vllm", "ck")],
    ids=str,
)
@examples(2)
@given(seed=seeds)
def test_hybrids(patch, kinds, seed):
    """Models whose groups of layers run on several backends."""
    run(seed, backends.hybrid(*(of_name(name, patch) for name in kinds)))


def of_name(name, patch):
    others = {
        "reference": lambda: backends.reference(by_hand=False),
        "flashinfer": backends.flashinfer,
        "latent": lambda: backends.flash("3_vllm", patch, latent=True),
        "ck": lambda: backends.rocm("ck", patch),
    }
    return others.get(name, lambda: backends.flash(name, patch))()


@pytest.mark.parametrize("kernel", ["sdpa", "triton"])
@examples(1)
@given(seed=seeds)
def test_rocm_in_a_process_of_its_own(tmp_path, kernel, seed):
    """Triton's interpreter has to be asked for before Triton is imported."""
    variables = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST", "COV"))}
    variables |= {"ATTNCORE_ROCM_DEV_DEVICE": "cpu", "TRITON_INTERPRET": "1", "XDG_CACHE_HOME": str(tmp_path)}
    variables |= {"PYTHONPATH": os.pathsep.join((str(TESTS), os.environ.get("PYTHONPATH", "")))}
    command = [sys.executable, "-P", "-m", "fuzz.layers", kernel, str(seed), "1"]
    done = subprocess.run(command, capture_output=True, text=True, env=variables, check=False, timeout=600)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
