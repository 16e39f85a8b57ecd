"""Who is inside an entrance of the numba side, whatever the threads of others do meanwhile.

That of the compiled side is asked within one call of C, between which no other thread runs.
"""

import sys
import threading

import pytest

from attncore.running_call import RunningCall

pytest.importorskip("numba")
from attncore.kernels.numba.entrance import Entrance


class Undo(list):
    """One in which another caller comes or goes, once, while its truth is asked for."""

    meanwhile = None

    def __bool__(self):
        found, meanwhile, self.meanwhile = len(self) > 0, self.meanwhile, None
        if meanwhile is not None:
            meanwhile()
        return found


@pytest.fixture
def entrance():
    entrance = Entrance()
    entrance.undo = Undo()
    return entrance


def test_a_call_that_ends_while_it_is_looked_at_is_no_unfinished_one(entrance):
    stay = entrance.enter()
    entrance.undo.append((int,))
    entrance.undo.meanwhile = lambda: stay.__exit__(None, None, None)
    assert not entrance.unfinished


def test_a_call_that_begins_while_it_is_looked_at_is_no_unfinished_one(entrance):
    with entrance.enter():
        pass
    entrance.undo.append((int,))
    entrance.undo.meanwhile = lambda: entrance.enter()
    assert not entrance.unfinished


def test_a_call_that_comes_and_goes_while_another_enters_refuses_it_nothing(entrance, monkeypatch):
    with entrance.enter():
        pass
    last = entrance.last

    def lasts():
        monkeypatch.undo()
        with entrance.enter():
            pass
        return False

    monkeypatch.setattr(last, "lasts", lasts)
    with entrance.enter():
        assert entrance.last is not last
        assert entrance.busy


def test_what_an_interrupted_call_has_left_is_unfinished(entrance):
    def interrupted():
        entrance.enter()
        entrance.undo.append((int,))

    interrupted()
    assert entrance.unfinished
    assert not entrance.busy
    with entrance.enter():
        assert entrance.busy
    assert not entrance.unfinished
    assert not entrance.undo


def test_a_call_over_holds_nothing_that_it_was_given(entrance):
    def call(given):
        with entrance.enter():
            pass

    given = Undo()
    call(given)
    assert sys.getrefcount(given) == 2


def in_another_thread():
    """The RunningCall of a thread, and how to end it; it calls functions, of which its stack changes, all the time."""
    started, ends, calls = threading.Event(), threading.Event(), []

    def nested(depth):
        if depth:
            nested(depth - 1)

    def run():
        calls.append(RunningCall(sys._getframe()))
        started.set()
        while not ends.is_set():
            nested(50)

    thread = threading.Thread(target=run)
    thread.start()
    started.wait(30)

    def end():
        ends.set()
        thread.join()

    return calls[0], end


def test_a_call_of_another_thread_lasts_until_it_is_over():
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    call, end = in_another_thread()
    try:
        assert all(call.lasts() for _ in range(20_000))
    finally:
        end()
        sys.setswitchinterval(before)
    assert not call.lasts()
