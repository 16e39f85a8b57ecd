"""The kit on caches that are not the reference's: fp8 with scales, heads first, a pair of tensors, other axes."""

import pytest

from attncore.testing.harness.run_suite import conformance

QUIET = ("-p", "no:terminal")
LIGHT = """
from attncore import BackendSpec, MultipleOf, hookimpl
from attncore.builder.fields import ARRAYS

@hookimpl
def attncore_backend():
    return BackendSpec(
        name={name!r}, api=1, factory="attn_{name}_heavy:Backend", devices={{"any": 5}},
        dtypes={{"float32", "float16"}}, kv_cache_dtypes={{"fp8_e4m3", "fp8_e5m2"}},
        head_sizes={{16, 32}}, block_sizes={{4, 16}}, kv_cache_layouts=({layouts},),
        features={{"sliding_window", "kv_scales", "kv_scales_on_device", "kv_scales_per_head", "strided_kv_cache"}},
        cuda_graph="uniform_decode", host_needs=ARRAYS, device_needs=ARRAYS, host_lengths="exact",
        unsupported={{"sinks": "the kernel has no place for them"}},
    )
"""
HEAVY = """
import dataclasses
import torch
from attncore import AttentionBackend, AttentionImpl
from attncore.reference import ReferenceBackend

class Impl(AttentionImpl):
    def forward(self, query, key, value, kv_cache, metadata, output=None, *, write=True):
        backend = self.backend
        inner = backend.inner.impl(
            self.layer_name, scale=self.scale, sliding_window=self.sliding_window, logits_soft_cap=self.logits_soft_cap
        )
        if kv_cache is None:  # a profiling run
            return inner.forward(query, key, value, None, metadata, output)
        views = backend.kv_cache_views(kv_cache)
        scales = [torch.as_tensor(scale).view(-1, 1) for scale in (self.k_scale, self.v_scale)]
        plain = [view.float() * scale for view, scale in zip(views, self.read(scales))]
        plain = [tensor.to(query.dtype) for tensor in plain]
        answer = inner.forward(query, key, value, plain, metadata, output, write=write)
        if write:
            self.write_cache(key, value, kv_cache, metadata)
        return answer

    def read(self, scales):
        return scales

class Backend(AttentionBackend):
    impl_class = Impl

    def __init__(self, config):
        super().__init__(config)
        if config.head_size not in (16, 32) or config.block_size not in (4, 16):
            raise ValueError(f"head_size: {config.head_size} or block_size {config.block_size} is not the kernel's")
        plain = dataclasses.replace(config, kv_cache_dtype="auto", kv_cache_layout="NHD", spec=None)
        self.inner = ReferenceBackend(plain)

    def kv_cache_shape(self, num_blocks, block_size, num_kv_heads, head_size):
        rest = (num_kv_heads, block_size) if self.config.kv_cache_layout == "HND" else (block_size, num_kv_heads)
        return (num_blocks, 2, *rest, head_size)
"""
PAIR = """
def allocate_kv_cache(self, num_blocks):
    return tuple(part.clone() for part in self.kv_cache_views(AttentionBackend.allocate_kv_cache(self, num_blocks)))

Backend.allocate_kv_cache = allocate_kv_cache
"""
OWN = """
def kv_cache_shape(self, num_blocks, block_size, num_kv_heads, head_size):
    return (num_blocks, block_size, 2, num_kv_heads, head_size)  # of each token the key, then the value

def kv_cache_views(self, kv_cache):
    if isinstance(kv_cache, torch.Tensor):
        return tuple(kv_cache.view(self.kv_cache_torch_dtype()).unbind(2))
    return AttentionBackend.kv_cache_views(self, kv_cache)

Backend.kv_cache_shape, Backend.kv_cache_views = kv_cache_shape, kv_cache_views
"""
THREE = """
def allocate_kv_cache(self, num_blocks):
    shape = (num_blocks, self.config.block_size, self.config.num_kv_heads)
    made = dict(dtype=self.kv_cache_torch_dtype(), device=self.config.device)
    return *(torch.zeros(*shape, self.config.head_size, **made) for _ in range(2)), torch.zeros(shape)

def kv_cache_views(self, kv_cache):
    return AttentionBackend.kv_cache_views(self, kv_cache if isinstance(kv_cache, torch.Tensor) else kv_cache[:2])

def write_cache(self, key, value, kv_cache, metadata):
    AttentionImpl.write_cache(self, key, value, kv_cache, metadata)
    if kv_cache is None or len(kv_cache) == 2:
        return
    slots = metadata.slot_mapping
    sums = key[: len(slots)].float().sum(-1)
    kv_cache[2].flatten(0, 1)[slots[slots >= 0]] = sums[slots >= 0]

def swap_blocks(self, src_kv_cache, dst_kv_cache, src_to_dst):
    AttentionBackend.swap_blocks(self, src_kv_cache, dst_kv_cache, src_to_dst)
    if len(src_kv_cache) == len(dst_kv_cache) == 3:
        pairs = torch.as_tensor(src_to_dst, dtype=torch.int64)
        dst_kv_cache[2][pairs[:, 1]] = src_kv_cache[2][pairs[:, 0]]

Backend.allocate_kv_cache, Backend.kv_cache_views, Impl.write_cache = allocate_kv_cache, kv_cache_views, write_cache
"""
SWAPPED = "Backend.swap_blocks = swap_blocks"
TRANSPOSED = """
def kv_cache_shape(self, num_blocks, block_size, num_kv_heads, head_size):
    return (num_blocks, 2, num_kv_heads, head_size, block_size)

def own_views(self, kv_cache):
    if isinstance(kv_cache, torch.Tensor):
        return tuple(kv_cache.view(self.kv_cache_torch_dtype()).permute(1, 0, 4, 2, 3))
    return AttentionBackend.kv_cache_views(self, kv_cache)

def kv_cache_views(self, kv_cache):
    return tuple({view} for view in self.own_views(kv_cache))

def write_cache(self, key, value, kv_cache, metadata):
    if kv_cache is None:
        return
    views = self.backend.own_views(kv_cache)
    rows = tuple(view.contiguous() for view in views)  # which CacheWriter takes
    AttentionImpl.write_cache(self, key, value, rows, metadata)
    for view, written in zip(views, rows):
        view.copy_(written)

Backend.kv_cache_shape, Backend.own_views, Impl.write_cache = kv_cache_shape, own_views, write_cache
Backend.kv_cache_views = kv_cache_views
"""


def plant(site, name, code="", layouts='"HND", "NHD"'):
    site.plugin(name, LIGHT.format(name=name, layouts=layouts), heavy=HEAVY + code)


@pytest.mark.parametrize("code", ["", PAIR], ids=["blocks_first", "pair_of_tensors"])
def test_an_fp8_cache_with_heads_first_passes(site, code):
    plant(site, "bytes", code)
    exit_code, report = conformance("bytes", settings="EXAMPLES = 8\n", options=QUIET)
    assert (exit_code, report.failures) == (0, [])
    states = {row["capability"]: row["state"] for row in report.rows()}
    for row in (
        "kv_scales",
        "kv_scales_on_device",
        "kv_scales_per_head",
        "scales set later",
        "cache fp8_e4m3",
        "cache fp8_e5m2",
        "layout HND",
        "layout NHD",
        "sliding_window",
        "strided_kv_cache",
    ):
        assert states[row] == "supported"


def test_a_layout_of_its_own_passes_with_the_views_that_its_class_gives(site):
    plant(site, "owner", OWN, '"own"')
    exit_code, report = conformance("owner", settings="EXAMPLES = 8\n", options=QUIET)
    assert (exit_code, report.failures) == (0, [])
    states = {row["capability"]: row["state"] for row in report.rows()}
    for row in ("layout own", "strided_kv_cache", "attend without writing", "copy and swap of blocks"):
        assert states[row] == "supported"
    assert states["layout NHD"] == "unsupported"


@pytest.mark.parametrize("swap", [SWAPPED, ""], ids=["swapped", "third part left where it was"])
def test_a_layout_of_its_own_may_be_several_tensors(site, swap):
    """Whose class gives what allocates, views, writes and copies them."""
    heavy = HEAVY.replace("(num_blocks, 2, *rest, head_size)", "(num_blocks, *rest, 2 * head_size + 1)")
    site.plugin("three", LIGHT.format(name="three", layouts='"own"'), heavy=heavy + THREE + swap)
    exit_code, report = conformance("three", settings="EXAMPLES = 4\n", options=QUIET)
    wanted = [
        "test_blocks_are_copied_within_caches",
        "test_blocks_are_swapped_to_another_cache",
        "test_a_request_reads_a_copied_block",
        "test_blocks_are_copied_and_swapped_in_a_layout[own]",
        "test_blocks_are_copied_and_swapped_in_each_dtype",
    ]
    assert {one.test for one in report.failures} == set(() if swap else wanted), [one.reason for one in report.failures]
    assert all("override swap_blocks in" in one.reason for one in report.failures)
    assert exit_code == (not swap)


@pytest.mark.parametrize(
    ("view", "found"),
    [("view", []), ("view.contiguous()", ["the engine"]), ("view.flip(1)", ["the engine"])],
    ids=["strided", "copies", "in another order"],
)
def test_an_engine_writes_by_views_of_any_strides(site, view, found):
    """Views that are of other memory, or of another order than the class itself writes, are found."""
    heavy = HEAVY.replace("backend.kv_cache_views", "backend.own_views") + TRANSPOSED.format(view=view)
    site.plugin("turned", LIGHT.format(name="turned", layouts='"own"'), heavy=heavy)
    options = (*QUIET, "-k", "test_a_layer_attends_without_writing")
    _, report = conformance("turned", settings="EXAMPLES = 4\n", options=options)
    failed = {one.test.partition("[")[2].rpartition("-")[0] for one in report.failures}
    assert failed >= set(found)
    assert bool(failed) == bool(found)


def test_a_layout_of_its_own_without_views_is_told(site):
    plant(site, "viewless", OWN.rpartition("Backend.kv_cache_shape,")[0], '"own"')
    exit_code, report = conformance("viewless", options=(*QUIET, "-k", "test_prefill"))
    assert exit_code == 1
    assert "found for layout own" in report.failures[0].reason


@pytest.mark.parametrize("argument", ["k_scale", "v_scale"])
def test_an_ignored_scale_is_found(site, argument):
    code = f"""
def init(self, backend, layer_name, **features):
    features[{argument!r}] = 1.0
    AttentionImpl.__init__(self, backend, layer_name, **features)
Impl.__init__ = init
"""
    plant(site, "unscaled", code)
    exit_code, report = conformance("unscaled", options=(*QUIET, "-k", "test_scales_of_an_fp8_cache"))
    assert exit_code == 1
    assert [one.test for one in report.failures] == [f"test_scales_of_an_fp8_cache[{argument}]"]


def test_a_cache_of_bytes_that_is_refused_is_found(site):
    code = """
whole_views = AttentionBackend.kv_cache_views
def kv_cache_views(self, kv_cache):
    if isinstance(kv_cache, torch.Tensor) and kv_cache.dtype == torch.uint8:
        raise ValueError("kv_cache: torch.uint8 found")
    return whole_views(self, kv_cache)
Backend.kv_cache_views = kv_cache_views
"""
    plant(site, "byteless", code)
    exit_code, report = conformance("byteless", options=(*QUIET, "-k", "test_an_fp8_cache_as_bytes"))
    assert exit_code == 1
    assert "with an fp8 cache as uint8: ValueError: kv_cache: torch.uint8 found" in report.failures[0].reason


SCALE_FAULTS = {
    "another heads scale": (
        "per_head or each_head",
        "def read(self, scales):\n    return [one.flip(0) for one in scales]",
    ),
    "swapped scales": ("each_head", "def read(self, scales):\n    return scales[::-1]"),
    "one scale for all heads": ("each_head", "def read(self, scales):\n    return [one[:1] for one in scales]"),
    "read at construction": (
        "set_after and numbers",
        "def read(self, scales):\n    return vars(self).setdefault('kept', [one.clone() for one in self.first])\n"
        "def init(self, *given, **features):\n    AttentionImpl.__init__(self, *given, **features)\n"
        "    self.first = [torch.as_tensor(one).reshape(-1, 1) for one in (self.k_scale, self.v_scale)]\n"
        "Impl.__init__ = init",
    ),
    "kept from the first step": (
        "captured_sizes_see",
        "def read(self, scales):\n    return vars(self).setdefault('kept', [one.clone() for one in scales])",
    ),
    "another tensor than graphs read": (
        "captured_sizes_see",
        "def read(self, scales):\n    return scales\n"
        "def set_scales(self, k_scale, v_scale):\n    self.other = k_scale, v_scale\nImpl.set_scales = set_scales",
    ),
    "calculated without the headroom": (
        "calculated",
        "def read(self, scales):\n    return scales\n"
        "def calculate(self, key, value):\n    self.set_scales(*(one.abs().amax() / 448 for one in (key, value)))\n"
        "Impl.calculate_kv_scales = calculate",
    ),
}


@pytest.mark.parametrize("fault", SCALE_FAULTS)
def test_wrong_scales_are_found(site, fault):
    chosen, code = SCALE_FAULTS[fault]
    name = fault.replace(" ", "_")
    plant(site, name, f"{code}\nImpl.read = read")
    exit_code, report = conformance(name, settings="EXAMPLES = 5\n", options=(*QUIET, "-k", chosen))
    assert exit_code == 1
    wrong = ("differs from dense", "calculate_kv_scales made k_scale [128.0], not 256.0")
    assert report.failures
    assert all(any(said in one.reason for said in wrong) for one in report.failures)
    if fault == "read at construction":
        assert "as if the scales were those before set_scales, by which the cache is read" in report.failures[0].reason


def test_heads_and_tokens_confused_is_found(site):
    plant(site, "confused", "Backend.kv_cache_views = lambda self, cache: (cache[:, 0], cache[:, 1])")
    exit_code, report = conformance("confused", settings="EXAMPLES = 5\n", options=(*QUIET, "-k", "layout"))
    assert exit_code == 1
    assert "test_kv_cache_layout[HND]" in [one.test for one in report.failures]
