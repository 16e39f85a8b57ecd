"""Loading plugins while another thread imports a module of one: it ends, with an error that says what happened."""

import importlib
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from planting import SPEC
from process_changes import ASKED

import attncore
from attncore.registry.plugins import plugin_code


def test_a_thread_that_imports_a_plugin_which_selects_waits_not_for_ever(site, monkeypatch):
    """This thread loads plugins and waits for the module; that thread imports it, and waits for the plugins."""
    monkeypatch.setattr(plugin_code, "LONGEST_WAIT", 0.3)
    started, loading = threading.Event(), threading.Event()
    monkeypatch.setattr(attncore, "tests_events", (started, loading), raising=False)
    source = f"""
import attncore
attncore.tests_events[0].set()
attncore.tests_events[1].wait(30)
attncore.select(**{ASKED!r})
"""
    site.plugin("aaa", source + SPEC.format(name="aaa", module="attn_aaa", extra=""))
    with ThreadPoolExecutor(1) as pool:
        imported = pool.submit(importlib.import_module, "attn_aaa")
        assert started.wait(30)
        with plugin_code.one_thread():
            loading.set()
            states = {one.name: one.state for one in attncore.backends()}
        with pytest.raises(attncore.PluginError, match=r"^plugins: another thread has run their code for 0.3 s"):
            imported.result(30)
    assert states["aaa"] == "broken"  # imported here, after that thread has given up, it asks for the backends again
