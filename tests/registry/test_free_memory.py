"""Free memory is that of the machine, or less where a control group of the process leaves less."""

import pytest

from attncore.registry.host import free_memory

MIB = 1 << 20


@pytest.fixture
def system(tmp_path, monkeypatch):
    """A machine with 1,000 MiB; the test writes its control groups."""
    monkeypatch.setattr(free_memory, "PROC", tmp_path / "proc")
    monkeypatch.setattr(free_memory, "CONTROL_GROUPS", tmp_path / "groups")
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/meminfo").write_text(f"MemTotal: 9 kB\nMemAvailable: {1000 * 1024} kB\n")
    return tmp_path


def group(system, folder, limit, used, given_back=0, version=2):
    place = system / "groups" / folder
    place.mkdir(parents=True, exist_ok=True)
    names = {1: ("memory.limit_in_bytes", "memory.usage_in_bytes"), 2: ("memory.max", "memory.current")}[version]
    for name, value in zip(names, (limit, used), strict=True):
        (place / name).write_text(f"{value * MIB if isinstance(value, int) else value}\n")
    stat = "total_inactive_file" if version == 1 else "inactive_file"
    (place / "memory.stat").write_text(f"anon 5\n{stat} {given_back * MIB}\n")


def joined(system, *lines):
    (system / "proc/self/cgroup").write_text("\n".join(lines) + "\n")


def test_without_control_groups_it_is_the_machines(system):
    assert free_memory.available_bytes("cpu") == 1000 * MIB
    joined(system, "0::/", "1:cpu:/x", "no such line")
    assert free_memory.available_bytes("cpu") == 1000 * MIB


def test_a_limit_counts_less_what_is_used_but_for_files_that_were_read(system):
    joined(system, "0::/app")
    group(system, "app", 500, 300, given_back=100)
    assert free_memory.available_bytes("cpu") == 300 * MIB


def test_a_group_around_it_may_leave_less(system):
    joined(system, "0::/pod/app")
    group(system, "pod/app", "max", 10)
    group(system, "pod", 400, 350)
    assert free_memory.available_bytes("cpu") == 50 * MIB


def test_in_a_container_the_root_is_its_own_group(system):
    joined(system, "0::/of/the/host")
    group(system, "", 200, 40)
    assert free_memory.available_bytes("cpu") == 160 * MIB


def test_the_first_version_has_a_folder_of_its_own(system):
    joined(system, "4:memory:/app", "0::/")
    group(system, "memory/app", 300, 120, given_back=20, version=1)
    assert free_memory.available_bytes("cpu") == 200 * MIB


def test_a_group_that_is_full_leaves_nothing(system):
    joined(system, "0::/app")
    group(system, "app", 100, 130)
    assert free_memory.available_bytes("cpu") == 0
