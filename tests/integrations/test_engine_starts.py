"""What an engine calls when it starts finds attncore's plugins, and runs no code of theirs. The engines are fakes."""

import sys
from enum import Enum
from types import ModuleType, SimpleNamespace

import pytest

from attncore.integrations.sglang import register as sglang_register
from attncore.integrations.vllm import names, registration

HANGS = "import time; time.sleep(1000)"


@pytest.fixture
def fake(monkeypatch):
    """Puts modules of an engine in sys.modules, and the packages that they are in."""

    def put(name, **attributes):
        for end in (i for i, letter in enumerate(f"{name}.") if letter == "."):
            package = name[:end]
            if package not in sys.modules or package == name:
                monkeypatch.setitem(sys.modules, package, ModuleType(package))
        vars(sys.modules[name]).update(attributes)
        parent, _, last = name.rpartition(".")
        setattr(sys.modules[parent], last, sys.modules[name])

    return put


@pytest.fixture
def a_plugin_that_hangs(site):
    site.plugin("aaa", HANGS)


def test_vllm_starts_beside_a_plugin_that_hangs(a_plugin_that_hangs, fake, monkeypatch, caplog):
    class AttentionBackendEnum(Enum):
        CUSTOM = ""

        def is_overridden(self):
            return False

    taken = []
    monkeypatch.setattr(names, "member", taken.append)
    monkeypatch.setattr(names, "pickle_by_name", lambda: None)
    monkeypatch.setattr(registration, "installed_version", lambda: "0.33.0")
    registry = {"AttentionBackendEnum": AttentionBackendEnum, "register_backend": lambda one, path: taken.append(path)}
    fake("vllm.v1.attention.backends.registry", **registry)
    registration.register()
    assert not caplog.text
    assert {"ATTNCORE_AAA", "ATTNCORE_REFERENCE", f"{names.CLASSES}.CUSTOM"} <= {*taken}
    assert names.backend_of("ATTNCORE_AAA") == "aaa"
    assert "attn_aaa" not in sys.modules


def test_sglang_starts_beside_a_plugin_that_hangs(a_plugin_that_hangs, fake, caplog):
    made, offered = {}, []
    fake(
        "sglang.srt.arg_groups",
        choices=SimpleNamespace(
            add_attention_backend_choices=offered.extend, add_draft_attention_backend_choices=offered.extend
        ),
    )
    fake(
        "sglang.srt.layers.attention.attention_registry",
        ATTENTION_BACKENDS=made,
        register_attention_backend=lambda name: lambda maker: made.setdefault(name, maker),
    )
    sglang_register.register()
    assert not caplog.text
    assert {"attncore", "attncore_aaa", "attncore_reference"} <= {*made}
    assert {*offered} == {*made}
    assert "attn_aaa" not in sys.modules


def test_an_sglang_whose_registry_is_elsewhere_starts(fake, caplog):
    fake("sglang.srt.arg_groups", other=1)
    sglang_register.register()
    assert "its backends are not known to SGLang: ImportError: cannot import name 'choices'" in caplog.text
