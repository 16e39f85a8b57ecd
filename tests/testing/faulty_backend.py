"""The source of a backend that is the reference but for one fault."""

from typing import NamedTuple

LIGHT = """
from attncore import BackendSpec, MultipleOf, hookimpl
from attncore.builder.fields import ARRAYS

TABLES = {{name for name in ARRAYS if not name.startswith("paged")}}

@hookimpl
def attncore_backend():
    facts = dict(
        name={name!r}, api=1, factory="attn_{name}_heavy:Backend", devices={{"any": 5}},
        dtypes={{"float32", "bfloat16"}}, head_sizes=MultipleOf(8), block_sizes=MultipleOf(4),
        features={{"sliding_window", "logits_soft_cap", "alibi", "sinks", "multi_token_decode"}},
        cuda_graph="uniform_decode", host_needs=TABLES, device_needs=TABLES, host_lengths="exact",
    )
    facts.update({facts})
    return BackendSpec(**facts)
"""
HEAVY = """
import copy
import functools
import numpy as np
import torch
from attncore import AttentionBackend, AttentionImpl
from attncore.builder.fields import ARRAYS, DERIVED
from attncore.builder.slices import HostArrays
from attncore.reference import ReferenceBackend, ReferenceImpl

def changed(metadata, **fields):
    '''The metadata with host fields replaced, and the device's from them.'''
    found = copy.copy(metadata)  # of a builder's own no field can be set
    held = {name: getattr(found.host, name) for name in ARRAYS - DERIVED if hasattr(found.host, name)}
    host = HostArrays(**{**held, **fields})
    made = {name: torch.from_numpy(np.ascontiguousarray(value)) for name, value in fields.items()}
    vars(found).update(made, host=host)
    return found

class Impl(ReferenceImpl):
    pass

class Backend(ReferenceBackend):
    impl_class = Impl
"""


class Fault(NamedTuple):
    """``code`` is appended to HEAVY, ``facts`` change the spec; ``test`` fails, and its reason holds ``says``."""

    name: str
    test: str
    says: str
    code: str = ""
    facts: str = ""
    light: str = ""


def forward(body: str, name: str = "forward") -> str:
    """Code that replaces a method; ``whole`` is the sound one."""
    lines = "\n".join(f"    {line}" for line in body.strip().splitlines())
    return f"""
def {name}(self, query, key, value, kv_cache, metadata, output=None, *, write=True):
    whole = functools.partial(super(Impl, self).{name}, write=write)
{lines}
Impl.{name} = {name}
"""


def init(body: str) -> str:
    """Code that runs ``body`` before the layer's constructor."""
    return f"""
def init(self, backend, layer_name, **features):
    {body}
    super(Impl, self).__init__(backend, layer_name, **features)
Impl.__init__ = init
"""


NOT_READ = """
def {name}(self, query, key, value, kv_cache, metadata, output=None, *, write=True):
    found = getattr(metadata.host, {field!r}, None)
    if found is not None and ({where}):
        metadata = changed(metadata, {field}=found * 0)
    return super(Impl, self).{name}(query, key, value, kv_cache, metadata, output, write=write)
Impl.{name} = {name}
"""
"""Code of a method that takes a field of the step for zeros in some calls."""
USUAL_SCALE = """
usual = self.backend.config.head_size**-0.5 if {where} else self.scale
return whole(query * (usual / self.scale), key, value, kv_cache, metadata, output)
"""
"""Body of a method that takes one over the root of the head size for the layer's scale in some calls."""
