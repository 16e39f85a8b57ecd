"""Backends are asked for while another thread is importing a module: its import goes on as if nobody had."""

import importlib.machinery
import subprocess
import sys
import threading
from types import ModuleType

import numpy as np
import pytest
from process_changes import ASKED

import attncore
from attncore.array_arguments import as_array, check_tensor
from attncore.registry.plugins import half_imported
from attncore.registry.plugins.left_as_found import Process
from attncore.registry.plugins.torch_settings import TorchSettings

WHILE_TORCH_IS_IMPORTED = """
import sys, threading, time
import attncore

failed = []

def imports():
    try:
        import torch
    except BaseException as error:
        failed.append(error)

thread = threading.Thread(target=imports)
thread.start()
while thread.is_alive() and "torch" not in sys.modules:
    time.sleep(0.0005)
attncore.backends()
attncore.select(num_heads=4, num_kv_heads=2, head_size=16, dtype="float32")
thread.join()
assert not failed, failed
import torch
torch.zeros(2).sum()
"""
CREATED_IN_THREADS = """
import threading
import attncore

failed, begin = [], threading.Barrier(8)

def creates():
    begin.wait()
    try:
        attncore.select(num_heads=4, num_kv_heads=2, head_size=16, dtype="float32").create()
    except BaseException as error:
        failed.append(error)

threads = [threading.Thread(target=creates) for _ in range(8)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
assert not failed, failed
"""


@pytest.mark.parametrize("code", [WHILE_TORCH_IS_IMPORTED, CREATED_IN_THREADS], ids=["asked for", "created"])
def test_torch_is_imported_whole_while_other_threads_ask_for_backends(code):
    pytest.importorskip("torch")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=100)
    assert done.returncode == 0, done.stderr


class Half(ModuleType):
    """A module that another thread is importing; whoever asks it for something that it lacks is noted."""

    def __init__(self, name):
        super().__init__(name)
        self.__spec__ = importlib.machinery.ModuleSpec(name, None)
        self.__spec__._initializing = True
        self.asked = []

    def __getattr__(self, name):
        if not name.startswith("__"):
            self.asked.append(name)
        raise AttributeError(name)


@pytest.fixture
def half_torch(monkeypatch):
    half = Half("torch")
    monkeypatch.setitem(sys.modules, "torch", half)
    return half


def test_half_of_torch_is_not_asked_for_its_settings(half_torch):
    found = TorchSettings("a plugin")
    assert found.changed() == []
    found.restore()
    assert half_torch.asked == []


def test_half_of_torch_has_no_tensors(half_torch):
    assert as_array("blocks", [[1, 2]]).tolist() == [[1, 2]]
    check_tensor("blocks", [1])
    batch = attncore.InputBatch(max_num_reqs=2, max_model_len=64, block_size=4)
    batch.add_request("a", np.array([1, 2]))
    assert attncore.AttentionRequest(**ASKED).dtype == ASKED["dtype"]
    assert {*half_torch.asked} <= {"Tensor", "dtype"}  # types alone, which are names of it


IMPORTED_SLOWLY = """
import sys
begun, ends = sys.events
begun.set()
ends.wait(60)
raise ImportError("half of it is there")
"""


@pytest.fixture
def import_of_another_thread(tmp_path, monkeypatch):
    """The name of a module that another thread is importing, and a function that lets the import fail."""
    (tmp_path / "half_of_another_thread.py").write_text(IMPORTED_SLOWLY)
    monkeypatch.syspath_prepend(tmp_path)
    begun, ends = events = threading.Event(), threading.Event()
    monkeypatch.setattr(sys, "events", events, raising=False)

    def run():
        with pytest.raises(ImportError, match="half of it is there"):
            importlib.import_module("half_of_another_thread")

    thread = threading.Thread(target=run)

    def end():
        ends.set()
        thread.join()

    thread.start()
    assert begun.wait(60)
    yield "half_of_another_thread", end
    end()


@pytest.mark.parametrize("locks", [True, False], ids=["by locks", "of all modules"])
def test_what_another_thread_imports_is_half_imported(monkeypatch, import_of_another_thread, locks):
    name, end = import_of_another_thread
    if not locks:  # a Python that does not say which modules are being imported
        monkeypatch.setattr(half_imported, "_LOCKS", None)
    assert half_imported.half_imported(sys.modules.copy()) == {name}
    modules = sys.modules.copy()
    end()
    assert half_imported.half_imported(modules) == set()


def test_a_module_whose_import_fails_meanwhile_does_not_come_back(monkeypatch, import_of_another_thread):
    """Half of it would then pass for the whole."""
    name, end = import_of_another_thread
    stays = ModuleType("other_than_attncore")
    monkeypatch.setitem(sys.modules, "other_than_attncore", stays)
    process = Process("a plugin")
    process.begin()
    end()
    del sys.modules["other_than_attncore"]
    process.restore()
    assert name not in sys.modules
    assert sys.modules["other_than_attncore"] is stays
