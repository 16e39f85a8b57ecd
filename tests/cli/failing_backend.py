"""A backend whose methods begin with statements that a test gives, and a replay over it."""

from attncore.cli import main

HEAVY = """
import torch
import attncore
from attncore import AttentionBackend, AttentionImpl

class Impl(AttentionImpl):
    def forward(self, query, key, value, kv_cache, metadata, output=None, *, write=True):
        {forward}
        return query

    def forward_with_lse(self, query, key, value, kv_cache, metadata, output=None, *, write=True):
        {lse}
        return query, torch.zeros(query.shape[:2])

class Backend(AttentionBackend):
    impl_class = Impl

    def __init__(self, config):
        super().__init__(config)
        {init}

    def impl(self, *args, **kwargs):
        {impl}
        return super().impl(*args, **kwargs)

    def plan(self, metadata):
        {plan}

    def allocate_kv_cache(self, num_blocks):
        {allocate}
        return super().allocate_kv_cache(num_blocks)

    def from_host(self, array):
        {from_host}
        return super().from_host(array)

    def kv_cache_shape(self, n, b, h, d):
        return {shape}
"""
METHODS = ("init", "impl", "plan", "allocate", "forward", "from_host", "lse")
CALLS = {"init": "its creation", "allocate": "allocate_kv_cache", "forward": "forward of layer 'layers.0'"}


def planter(site):
    """What plants the backend ``acme`` whose methods begin with the statements given."""

    def plant(**statements):
        heavy = HEAVY
        for name in METHODS:
            heavy = heavy.replace("{" + name + "}", statements.get(name, "pass"))
        heavy = heavy.replace("{shape}", statements.get("shape", "(n, 2, b, h, d)"))
        site.plugin("acme", heavy=heavy, extra=" features={'lse'},")

    return plant


def replayed(capsys, trace, *words):
    code = main(["replay", trace, "--backend", "acme", "--requests", "1", "--num-blocks", "100", *words])
    out, err = capsys.readouterr()
    assert "Traceback" not in err
    return code, out, err
