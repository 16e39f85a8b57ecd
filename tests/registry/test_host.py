"""The host as a value, and the probe on machines made of files."""

import dataclasses
import time

import pytest

from attncore import Host
from attncore.registry.host import nvidia, probe
from attncore.registry.host.accelerator import Accelerator
from attncore.registry.host.amd import gfx_name
from attncore.registry.host.visible_devices import visible_devices

CPUINFO = "processor\t: 0\nmodel name\t: A Processor\nflags\t\t: fpu avx2 avx512f\n\nprocessor\t: 1\nflags\t\t: other\n"


@pytest.fixture
def no_nvidia(monkeypatch):
    monkeypatch.setattr(nvidia, "devices", lambda root, notes: ("", []))


def nvidia_machine(monkeypatch, *devices, driver="580.82.07"):
    monkeypatch.setattr(nvidia, "devices", lambda root, notes: (driver, list(devices)))


def write(root, path, text=""):
    (root / path).parent.mkdir(parents=True, exist_ok=True)
    (root / path).write_text(text)


def kfd(root, *versions):
    for index, version in enumerate(versions):
        node = f"sys/class/kfd/kfd/topology/nodes/{index}"
        write(root, f"{node}/properties", f"cpu_cores_count 0\ngfx_target_version {version}\nunique_id {index + 10}\n")
        write(root, f"{node}/name", "a name\n")


@pytest.mark.parametrize(
    ("device", "platform", "arch", "torch_device"),
    [
        ("sm_90", "cuda", "sm_90", "cuda:0"),
        ("rocm:gfx942", "rocm", "gfx942", "cuda:0"),
        ("cpu", "cpu", "cpu", "cpu"),
    ],
)
def test_assume(device, platform, arch, torch_device):
    host = Host.assume(device)
    assert (host.platform, host.arch, host.torch_device, host.assumed) == (platform, arch, torch_device, True)


def test_what_is_stated_wins_over_what_is_here():
    host = Host.assume("cpu", packages={"torch": "", "triton": "3.6"}).with_packages({"torch": "2.13", "numba": "1"})
    assert dict(host.packages) == {"torch": "", "triton": "3.6", "numba": "1"}


def test_a_host_is_a_value():
    host = Host.assume("cpu")
    with pytest.raises(dataclasses.FrozenInstanceError):
        host.device = "sm_90"
    with pytest.raises(TypeError):
        host.packages["torch"] = "2"


def test_this_machine_can_be_probed_and_is_cached():
    assert Host.probe() is Host.probe()
    assert Host.probe().assumed is False


def test_a_machine_without_accelerators(tmp_path, no_nvidia):
    write(tmp_path, "proc/cpuinfo", CPUINFO)
    host = probe.probe(tmp_path, {})
    assert (host.device, host.device_name, host.notes) == ("cpu", "A Processor", ())
    assert host.cpu_flags == {"fpu", "avx2", "avx512f"}


def test_a_machine_without_any_of_the_files(tmp_path, no_nvidia):
    assert probe.probe(tmp_path, {}).device == "cpu"


def test_amd_devices_by_topology(tmp_path, no_nvidia):
    kfd(tmp_path, 0, 90402, 90402)
    write(tmp_path, "sys/module/amdgpu/version", "6.10.5\n")
    write(tmp_path, "dev/kfd")
    host = probe.probe(tmp_path, {})
    assert (host.device, host.device_count, host.driver, host.notes) == ("rocm:gfx942", 2, "6.10.5", ())


def test_amd_without_the_device_node_is_noted(tmp_path, no_nvidia):
    kfd(tmp_path, 0, 90010)
    assert "/dev/kfd is not there" in probe.probe(tmp_path, {}).notes[0]


@pytest.mark.parametrize(
    ("version", "name"),
    [
        (90402, "gfx942"),
        (90010, "gfx90a"),
        (110000, "gfx1100"),
        (120001, "gfx1201"),
        (100302, "gfx1032"),
        (90500, "gfx950"),
    ],
)
def test_gfx_names(version, name):
    assert gfx_name(version) == name


def test_nvidia_comes_first(tmp_path, monkeypatch):
    kfd(tmp_path, 90402)
    nvidia_machine(monkeypatch, Accelerator("cuda:sm_90", "H200", "GPU-a"), Accelerator("cuda:sm_90", "H200", "GPU-b"))
    host = probe.probe(tmp_path, {})
    assert (host.device, host.device_name, host.device_count, host.driver) == ("cuda:sm_90", "H200", 2, "580.82.07")


def test_devices_of_several_kinds_are_noted(tmp_path, monkeypatch):
    nvidia_machine(
        monkeypatch, Accelerator("cuda:sm_90", "x"), Accelerator("cuda:sm_120", "y"), Accelerator("cuda:sm_120", "y")
    )
    host = probe.probe(tmp_path, {"CUDA_VISIBLE_DEVICES": "2,0"})
    assert (host.device, host.device_count) == ("cuda:sm_120", 1)
    assert "several kinds" in host.notes[0]


def test_hidden_devices_leave_the_cpu(tmp_path, monkeypatch):
    nvidia_machine(monkeypatch, Accelerator("cuda:sm_90", "x"))
    host = probe.probe(tmp_path, {"CUDA_VISIBLE_DEVICES": ""})
    assert (host.device, host.notes) == ("cpu", ("1 NVIDIA device(s) hidden by CUDA_VISIBLE_DEVICES",))


@pytest.mark.parametrize(
    ("entries", "chosen"),
    [
        ("0", "a"),
        ("1,0", "ba"),
        ("2,0", "ca"),
        ("GPU-b", "b"),
        ("0,9,1", "a"),
        ("-1", ""),
        ("nonsense", ""),
        ("MIG-12", "a"),
        (" 1 , 2 ", "bc"),
        pytest.param("1," + "9" * 5000, "b", id="thousands of digits"),
    ],
)
def test_visible_devices(entries, chosen):
    devices = [Accelerator("cuda:sm_90", letter, f"GPU-{letter}{letter}") for letter in "abc"]
    found = visible_devices(devices, ("V",), {"V": entries})
    assert "".join(device.name for device in found) == chosen


def test_a_probe_that_fails_is_a_note(tmp_path, monkeypatch):
    def fails(root, notes):
        raise OSError("the driver is asleep")

    monkeypatch.setattr(nvidia, "devices", fails)
    host = probe.probe(tmp_path, {})
    assert host.device == "cpu"
    assert "the driver is asleep" in host.notes[0]


def test_the_drivers_version_from_proc(tmp_path):
    text = (
        "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.82.07  Release Build\nGCC version:  gcc 13.3.0\n"
    )
    write(tmp_path, "proc/driver/nvidia/version", text)
    assert nvidia.driver_version(tmp_path) == "580.82.07"
    assert nvidia.driver_version(tmp_path / "nowhere") == ""


def test_a_driver_without_libraries_is_noted(tmp_path, monkeypatch):
    def missing(name):
        raise OSError(name)

    monkeypatch.setattr(nvidia.ctypes, "CDLL", missing)
    write(tmp_path, "proc/driver/nvidia/version", "Module  580.82.07  x")
    notes = []
    assert nvidia.devices(tmp_path, notes) == ("580.82.07", [])
    assert "neither libnvidia-ml.so.1 nor libcuda.so.1" in notes[0]


def test_names_of_distributions_are_normalised():
    host = Host.assume("cpu", packages={"Acme_Kernels": "2.0"})
    assert dict(host.packages) == {"acme-kernels": "2.0"}
    assert dict(host.stating({"acme.kernels": "3"}).packages) == {"acme-kernels": "3"}
    assert dict(host.with_packages({"ACME-kernels": "1"}).packages) == {"acme-kernels": "2.0"}


def test_a_process_that_the_driver_starts_is_not_waited_for(monkeypatch):
    program = (
        "import json, subprocess, sys\nprint('noise')\nsubprocess.Popen(['sleep', '60'], start_new_session=True)\n"
    )
    program += "with open(sys.argv[1], 'w') as file: json.dump({'devices': [['cuda:sm_90', 'H200']]}, file)"
    monkeypatch.setattr(nvidia.ctypes, "CDLL", lambda name: None)
    monkeypatch.setattr(nvidia, "_ASK_DRIVER", program)
    started = time.monotonic()
    assert nvidia._ask_driver() == [Accelerator("cuda:sm_90", "H200")]
    assert time.monotonic() - started < 15


@pytest.mark.parametrize(
    "program", ["import os; os.abort()", "pass", "open(__import__('sys').argv[1], 'w').write('[')"]
)
def test_a_driver_that_gives_no_answer_has_no_devices(monkeypatch, program):
    monkeypatch.setattr(nvidia.ctypes, "CDLL", lambda name: None)
    monkeypatch.setattr(nvidia, "_ASK_DRIVER", program)
    assert nvidia._ask_driver() == []


@pytest.mark.parametrize(
    ("packages", "said"),
    [
        ({"torch": 2.11}, "packages: the version of 'torch' is 2.11, not a string such as '2.10'"),
        ({"torch": None}, "packages: the version of 'torch' is None"),
        ({3: "2"}, "packages: 3 is not the name of a distribution"),
        (["torch==2.11"], "packages: ['torch==2.11'] is not a mapping"),
        ("torch==2.11", "packages: 'torch==2.11' is not a mapping"),
        (0, "packages: 0 is not a mapping"),
        (False, "packages: False is not a mapping"),
        ({"x" * 10**6: 10**5000}, "packages: the version of 'xxx"),
    ],
    ids=range(8),
)
def test_packages_of_wrong_types_are_refused(packages, said):
    for call in (lambda: Host.assume("cpu", packages=packages), lambda: Host.assume("cpu").stating(packages)):
        with pytest.raises(TypeError) as caught:
            call()
        assert str(caught.value).startswith(said)
        assert len(str(caught.value)) < 500


@pytest.mark.parametrize("device", [None, 3, "x" * 10**6, 10**5000, b"cpu", "sm_90\x1b"], ids=range(6))
def test_devices_that_are_none_are_refused_in_short(device):
    with pytest.raises(ValueError, match=r"^device: ") as caught:
        Host.assume(device)
    assert len(str(caught.value)) < 400
    assert str(caught.value).isprintable()


@pytest.mark.parametrize("field", ["device_name", "driver", "machine"])
def test_texts_of_a_host_are_strings(field):
    with pytest.raises(TypeError, match=rf"^{field}: 580 is not a string"):
        Host(device="cpu", **{field: 580})


@pytest.mark.parametrize("field", ["device_name", "driver", "machine", "notes"])
def test_a_repr_has_no_control_codes(field):
    text = "\x1b[31mred\u202e\n"
    shown = repr(Host(device="cpu", **{field: (text,) if field == "notes" else text}))
    assert shown.replace("\n", "").isprintable()
    assert "x1b[31mred" in shown
