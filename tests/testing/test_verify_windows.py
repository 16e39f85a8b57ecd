"""``verify`` goes beyond the window that it is asked for, or says that it does not."""

import pytest

torch = pytest.importorskip("torch")

from attncore.abstract import BackendConfig  # noqa: E402
from attncore.reference import ReferenceBackend  # noqa: E402
from attncore.testing.verify_child import MOST_WINDOW, compared  # noqa: E402


class Forgetful(ReferenceBackend):
    """Its layers attend over all keys, whatever their window is."""

    name = "forgetful"

    def impl(self, layer_name, **features):
        return super().impl(layer_name, **{**features, "sliding_window": None})


def backend_of(kind, block_size=16):
    return kind(BackendConfig(2, 1, 16, "float32", block_size))


@pytest.mark.parametrize("window", [1, 2, 8, 64, 129])
def test_a_window_that_is_ignored_is_found(window):
    found = compared(backend_of(Forgetful), {"sliding_window": window})
    assert found["state"] == "differs"
    assert compared(backend_of(ReferenceBackend), {"sliding_window": window})["state"] == "agrees"


def test_the_longest_window_that_is_reached():
    assert compared(backend_of(Forgetful), {"sliding_window": MOST_WINDOW})["state"] == "differs"


@pytest.mark.parametrize("block_size", [1, 2, 3, 256])
@pytest.mark.parametrize("window", [12, 200])
def test_blocks_of_any_size_have_room(window, block_size):
    assert compared(backend_of(ReferenceBackend, block_size), {"sliding_window": window})["state"] == "agrees"


def test_a_window_that_is_not_reached_is_said():
    found = compared(backend_of(ReferenceBackend), {"sliding_window": 4096})
    assert found["state"] == "agrees"
    assert found["against"].endswith(", in contexts that the window of 4096 tokens does not cut")
