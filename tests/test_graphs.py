"""The stand-in for CUDA graphs: it records, replays and refuses as the real one does."""

import contextlib
import gc
import threading

import numpy as np
import pytest

from attncore import graphs
from attncore.errors import AttncoreError, CaptureError


def test_a_replay_reads_the_captured_arrays_and_writes_the_captured_results():
    given, graph = np.arange(3), graphs.StandInGraph()
    with graphs.capturing(graph) as opened:
        doubled = graphs.launch(np.multiply, given, 2)
        total, most = graphs.launch(lambda array: (np.atleast_1d(array.sum()), array.max(keepdims=True)), doubled)
        assert graphs.launch(lambda: None) is None
    assert opened is graph
    for step in range(3):
        given[:] = step + 1, 5, 7
        graph.replay()
        assert doubled.tolist() == [2 * step + 2, 10, 14]
        assert (total.tolist(), most.tolist()) == ([2 * step + 26], [14])


def test_only_launches_are_recorded():
    calls, graph = [], graphs.StandInGraph()
    graphs.launch(calls.append, "before")
    with graphs.capturing(graph):
        calls.append("python")
        graphs.launch(calls.append, "inside")
    graphs.launch(calls.append, "after")
    calls.clear()
    graph.replay()
    assert calls == ["inside"]


def test_a_capture_is_open_in_its_own_thread_only():
    seen = {}
    assert not graphs.is_capturing("cpu")
    with graphs.capturing(graphs.StandInGraph()):
        assert graphs.is_capturing("cpu")
        thread = threading.Thread(target=lambda: seen.update(other=graphs.is_capturing("cpu")))
        thread.start()
        thread.join()
    assert not graphs.is_capturing("cpu")
    assert seen == {"other": False}


def test_captures_and_replays_at_the_wrong_moment():
    graph, other = graphs.StandInGraph(), graphs.StandInGraph()
    with pytest.raises(CaptureError, match="replay: this graph holds no capture"):
        graph.replay()
    with graphs.capturing(graph):
        with pytest.raises(CaptureError, match="capturing: a capture is open in this thread"):
            with graphs.capturing(other):
                pass
        with pytest.raises(CaptureError, match="replay: a capture is open"):
            graph.replay()
        assert graphs.is_capturing("cpu")
    with pytest.raises(CaptureError, match="capturing: this graph holds a capture already"):
        with graphs.capturing(graph):
            pass
    graph.replay()
    graph.reset()
    with pytest.raises(CaptureError, match="replay: this graph holds no capture"):
        graph.replay()
    assert issubclass(CaptureError, AttncoreError)
    assert issubclass(CaptureError, RuntimeError)


def test_a_capture_that_fails_leaves_nothing():
    graph, calls = graphs.StandInGraph(), []

    def fails():
        with graphs.capturing(graph):
            graphs.launch(calls.append, 1)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fails()
    assert not graphs.is_capturing("cpu")
    with graphs.capturing(graph):
        graphs.launch(calls.append, 2)
    calls.clear()
    graph.replay()
    assert calls == [2]


def test_a_cpu_gets_a_stand_in():
    assert isinstance(graphs.new_graph("cpu"), graphs.StandInGraph)


def test_no_garbage_is_collected_during_a_capture_on_cuda(monkeypatch):
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.cuda, "graph", contextlib.nullcontext)
    graph = object()
    with graphs.capturing(graph) as opened:
        assert not gc.isenabled()
    assert opened is graph
    assert gc.isenabled()
    with pytest.raises(RuntimeError, match="of the body"), graphs.capturing(graph):
        raise RuntimeError("of the body")
    assert gc.isenabled()
