"""What every test may use. Each test of the hot path runs on both implementations through the ``kernels`` fixture."""

import importlib
import os
import signal

import processor_times
import pytest

from attncore import env

# Their asserts are kept under python -O (make test-dev), as those of the test modules are.
pytest.register_assert_rewrite("batches", "batches_checks", "batches_requests", "batches_steps", "fuzz", "graph_engine")


@pytest.fixture(params=["cython", "numba"])
def kernels(request):
    """The name of an implementation of the kernels."""
    if request.param == "cython":
        try:
            importlib.import_module("attncore._slots")
        except ImportError:
            if env.require_ext():
                raise
            pytest.skip("the compiled extension is not installed")
    return request.param


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """Marks the tests that tests/slow_tests.txt lists, before -m selects."""
    slow = processor_times.listed()
    for item in items:
        if item.nodeid in slow:
            item.add_marker(pytest.mark.slow)


def pytest_configure(config):
    """Tests without a GPU see none, so that they run alike where one is there.

    Under nohup, or in a shell's background, signals are ignored, and children would inherit that. Small tensors on all
    cores, in a process for each core, took ten times as long as on one.
    """
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    if "not gpu" in config.getoption("markexpr"):
        os.environ |= dict.fromkeys(("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"), "")
    for number, usual in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, usual)
