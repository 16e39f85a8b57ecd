"""What a plugin leaves of torch's settings while it loads, checks a request or creates a backend is put back."""

import json
import subprocess
import sys

import pytest
from planting import HEAVY, SPEC
from process_changes import ASKED

import attncore
from attncore.registry.plugins import torch_settings
from attncore.registry.plugins.torch_settings import _SETTINGS

torch = pytest.importorskip("torch")

CHANGES = {
    "default dtype": "set_default_dtype(torch.float64)",
    "default device": "set_default_device('meta')",
    "gradients": "set_grad_enabled(False)",
    "number of threads": "set_num_threads(torch.get_num_threads() + 1)",
    "deterministic algorithms": "use_deterministic_algorithms(True, warn_only=True)",
    "float32 matmul precision": "set_float32_matmul_precision('medium')",
    "flushed denormal numbers": "set_flush_denormal(True)",
    "anomaly detection": "set_anomaly_enabled(True, False)",
    "autocast on cpu": "set_autocast_enabled('cpu', True)",
    "autocast on cuda": "set_autocast_dtype('cuda', torch.bfloat16)",
    "scaled_dot_product_attention by math": "backends.cuda.enable_math_sdp(False)",
    "scaled_dot_product_attention by flash": "backends.cuda.enable_flash_sdp(False)",
    "scaled_dot_product_attention by mem_efficient": "backends.cuda.enable_mem_efficient_sdp(False)",
    "scaled_dot_product_attention by cudnn": "backends.cuda.enable_cudnn_sdp(False)",
    "backends.mkldnn.enabled": "backends.mkldnn.enabled = False",
    "backends.cudnn.enabled": "backends.cudnn.enabled = False",
    "backends.cudnn.deterministic": "backends.cudnn.deterministic = True",
    "backends.cudnn.benchmark": "backends.cudnn.benchmark = True",
}
ALL = "import torch\n" + "\n".join(f"torch.{change}" for change in CHANGES.values())
CHECK = f"def check(request, host):\n    {ALL.replace(chr(10), chr(10) + '    ')}\n    return ()\n"


def settings():
    return {setting.name: setting.asked(torch) for setting in _SETTINGS}


@pytest.fixture(autouse=True)
def as_before(monkeypatch):
    """What a test fails to put back, it does itself; pytest's own threads do not count."""
    monkeypatch.setattr(torch_settings, "active_count", lambda: 1)
    before = settings()
    yield
    for setting in _SETTINGS:
        setting.put(torch, before[setting.name])


def source(before="", extra=""):
    return before + "\n" + SPEC.format(name="aaa", module="attn_aaa", extra=extra)


@pytest.mark.parametrize("name", CHANGES)
def test_a_setting_is_put_back_and_told(site, name, caplog):
    before = settings()
    site.plugin("aaa", source(f"import torch\ntorch.{CHANGES[name]}"))
    assert "aaa" in {one.name for one in attncore.backends()}
    assert settings() == before
    assert f"attn-aaa 1.0 leaves settings of torch changed, which are put back: {name}\n" in caplog.text


def test_every_setting_of_the_table_is_tried():
    assert list(CHANGES) == [setting.name for setting in _SETTINGS]


def test_while_it_checks_a_request_and_while_it_creates_a_backend(site):
    before = settings()
    site.plugin("aaa", source(CHECK, " check=check,"), heavy=f"{ALL}\n{HEAVY}")
    choice = attncore.select(**ASKED)
    assert choice.name == "aaa"
    assert settings() == before
    choice.create("cpu")
    assert sys.modules["attn_aaa_heavy"].torch is torch  # its module, which changes all of it, has run
    assert settings() == before


def test_what_another_thread_may_have_changed_stays_and_is_told(site, monkeypatch, caplog):
    """Such as the default dtype while it makes a model: what was found would be put back too late."""
    monkeypatch.setattr(torch_settings, "active_count", lambda: 2)
    site.plugin("aaa", source("import torch\ntorch.set_default_dtype(torch.float64)\ntorch.set_grad_enabled(False)"))
    attncore.backends()
    assert (torch.get_default_dtype(), torch.is_grad_enabled()) == (torch.float64, True)
    assert "which stay, since other threads may have changed them: default dtype\n" in caplog.text
    assert "which are put back: gradients\n" in caplog.text


def test_while_it_fails_to_create_one(site):
    before = settings()
    site.plugin("aaa", heavy=f"{ALL}\nraise ValueError('mine')")
    with pytest.raises(attncore.PluginError, match="mine"):
        attncore.select(**ASKED).create("cpu")
    assert settings() == before


def test_a_setting_that_was_changed_before_stays(site):
    torch.set_default_dtype(torch.float64)
    torch.set_default_device("meta")
    before = settings()
    site.plugin("aaa", source(ALL))
    attncore.backends()
    assert settings() == before


SHOWN = """
import json, sys
from attncore.registry.plugins.torch_settings import _SETTINGS
print(json.dumps({one.name: str(one.asked(sys.modules["torch"])) for one in _SETTINGS}))
"""
LOADED = """
import sys
import attncore
assert "torch" not in sys.modules
attncore.backends()
"""


def run(program):
    program = f"import sys\nsys.path[:0] = {[path for path in sys.path if path]}\n{program}"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=100)
    assert done.stderr == ""
    return done.stdout


def test_a_plugin_that_imports_torch_first_leaves_what_torch_begins_with(site):
    site.plugin("aaa", source(ALL))
    found, wanted = json.loads(run(LOADED + SHOWN)), json.loads(run("import torch" + SHOWN))
    del found["number of threads"], wanted["number of threads"]  # torch takes it from the machine
    assert found == wanted


def test_a_plugin_that_blocks_torch_blocks_it_for_nobody(site):
    site.plugin("aaa", source("import sys\nsys.modules['torch'] = None"))
    run(f"{LOADED}import torch")
