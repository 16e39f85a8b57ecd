"""Files of metadata that have no end, or are far too long: in zip files, lists of files, and of attncore's own name."""

import importlib
import os
import sys
import zipfile
from types import SimpleNamespace

import pytest

from attncore import how_to_install
from attncore.installed_metadata import check_files, installed_version
from attncore.registry.plugins import load
from attncore.testing.verify import _modified_of


def _replace(file, kind):
    file.unlink(missing_ok=True)
    if kind == "a pipe":
        os.mkfifo(file)
    elif kind == "a device":
        file.symlink_to("/dev/zero")
    elif kind == "no text":
        file.write_bytes(b"\xff\xfe")
    elif kind == "a long one":
        with file.open("wb") as long:
            long.truncate(1 << 40)
    else:  # csv reads no such field
        file.write_text(f"{'x' * 200_000},,\n")


@pytest.mark.parametrize("name", ["entry_points.txt", "METADATA"])
def test_one_in_a_zip_file_is_not_unpacked(site, tmp_path, monkeypatch, name):
    site.plugin("good", extra="requires=('attn-zipped>=1',)")
    texts = {
        "entry_points.txt": "[attncore.backends]\nzipped = attn_zipped\n",
        "METADATA": "Metadata-Version: 2.1\nName: attn-zipped\nVersion: 1.0\n",
    }
    file = tmp_path / "zipped.zip"
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as packed:
        for one, text in texts.items():
            packed.writestr(f"attn_zipped-1.0.dist-info/{one}", text + "#" * (1 << 25) * (one == name))
    monkeypatch.setattr(sys, "path", [str(file), *sys.path])
    importlib.invalidate_caches()
    found = {record.name: record for record in load.registry().records}
    assert found["good"].state == "loaded"
    assert ("zipped" in found) is (name == "METADATA")
    if name == "METADATA":
        assert found["zipped"].version == ""
        with pytest.raises(OSError, match=f"^{name} has more than"):
            installed_version("attn-zipped")


def test_a_library_that_finds_distributions_in_place_of_python(tmp_path):
    """importlib_metadata, once something has imported it, has paths in zip files of its own."""
    path = pytest.importorskip("zipp").Path
    file = tmp_path / "zipped.zip"
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as packed:
        packed.writestr("zipped-1.0.dist-info/METADATA", "#" * (1 << 25))
    found = SimpleNamespace(_path=path(file, "zipped-1.0.dist-info/"))
    with pytest.raises(OSError, match=r"^METADATA has more than"):
        check_files(found, "METADATA")


def test_metadata_in_a_zip_file_are_read(site, tmp_path, monkeypatch):
    file = tmp_path / "zipped.zip"
    with zipfile.ZipFile(file, "w") as packed:
        packed.writestr("zipped-1.5.dist-info/METADATA", "Metadata-Version: 2.1\nName: zipped\nVersion: 1.5\n")
    monkeypatch.setattr(sys, "path", [str(file), *sys.path])
    site.plugin("good", extra="requires=('zipped>=1',)")
    assert load.registry().packages["zipped"] == "1.5"


@pytest.mark.parametrize("kind", ["a pipe", "a device", "a long one", "a long field"])
def test_a_list_of_files_is_not_read(site, kind):
    """`attncore verify` asks it whether a plugin has changed."""
    info = site.plugin("endless")
    (info / "RECORD").write_text("attn_endless.py,,\n")
    assert _modified_of("attn-endless").keys() == {"attn_endless.py"}
    _replace(info / "RECORD", kind)
    assert _modified_of("attn-endless") == {}


@pytest.mark.parametrize("kind", ["a pipe", "a device", "a long one", "no text"])
def test_errors_say_what_to_install_all_the_same(site, tmp_path, kind):
    """A distribution that takes attncore's name, or that of what an extra requires."""
    for name in ("attncore", "pygal"):
        info = tmp_path / f"{name}-9.0.dist-info"
        info.mkdir()
        for file in ("METADATA", "direct_url.json"):
            _replace(info / file, kind)
    importlib.invalidate_caches()
    how_to_install._origin.cache_clear()
    try:
        assert how_to_install.install_extra("html").startswith("pip install -e ")
        assert not how_to_install._is_met("pygal>=3")
        assert how_to_install.install_distribution("attn-flash").startswith("pip install ")
        assert how_to_install.install_required("pluggy").startswith("pip install ")
    finally:
        how_to_install._origin.cache_clear()


def test_a_run_of_bench_is_not_lost_for_a_version(site, tmp_path):
    pytest.importorskip("torch")
    from attncore.testing.bench.run import Question, _versions

    info = tmp_path / "numpy-9.0.dist-info"
    info.mkdir()
    _replace(info / "METADATA", "a pipe")
    importlib.invalidate_caches()
    assert _versions(Question("acme", "attn-acme 1.0"))["numpy"] == ""
