"""Specs of plugins and requests with fields of any kind: made, or refused in words that begin with the field; specs of
sensible ones: whoever reads them for what runs here agrees.
"""

import dataclasses
import json

from fuzz.budget import examples
from fuzz.hostile import fixed, mappings, objects
from fuzz.outcomes import outcome
from hypothesis import given
from hypothesis import strategies as st
from registry.test_spec import FACTS

from attncore import AttentionRequest, BackendSpec, MultipleOf, Variant
from attncore.cli.verify import _filled_in
from attncore.registry.choice.choice import choose
from attncore.registry.choice.negotiate import negotiate
from attncore.registry.choice.runs_here import reasons_by_variant, reasons_here, request_here
from attncore.registry.host.host import Host
from attncore.registry.plugins.plugin_record import PluginRecord
from attncore.testing.harness.subject import _base
from attncore.vocabulary import DTYPES, KV_CACHE_DTYPES, PHASES

REQUEST = {"num_heads": 8, "num_kv_heads": 2, "head_size": 64, "dtype": "bfloat16"}
values = st.one_of(
    objects,
    st.sampled_from(mappings("cpu")),
    st.sampled_from(["", "x\ny", "../x", "a" * 999, MultipleOf(8)]).map(fixed),
)


HOSTS = [Host.assume("cpu"), Host.assume("cuda:sm_90"), Host.assume("rocm:gfx942")]


some_sizes = st.sampled_from([1, 8, 64, 80, 128, 512, 576, 4096, 2**31, 2**40])
sets_of_sizes = st.sets(some_sizes, min_size=1, max_size=3) | st.sampled_from([1, 8, 64, 512]).map(MultipleOf)
SENSIBLE = {
    "head_sizes": sets_of_sizes,
    "head_size_v": st.none() | sets_of_sizes,
    "block_sizes": st.sets(st.sampled_from([1, 16, 256]), min_size=1),
    "devices": st.dictionaries(st.sampled_from(["any", "cpu", "cuda:sm_80+", "rocm"]), st.just(5), min_size=1),
    "dtypes": st.sets(st.sampled_from(DTYPES), min_size=1),
    "kv_cache_dtypes": st.sets(st.sampled_from(KV_CACHE_DTYPES), min_size=1),
    "phases": st.sets(st.sampled_from(PHASES), min_size=1),
    "use_mla": st.booleans(),
    "mla_only": st.booleans(),
    "max_group_size": st.none() | st.sampled_from([1, 4, 16]),
}
sensible = st.fixed_dictionaries({}, optional=SENSIBLE)


def named(cls):
    return st.sampled_from([field.name for field in dataclasses.fields(cls) if field.init])


def given_fields(cls):
    """One to three fields, each with a value of any kind."""
    return st.dictionaries(named(cls), values, min_size=1, max_size=3)


def made(fields):
    return {name: value() for name, value in fields.items()}


def judge(spec, request):
    """The spec negotiates with the request on every host, and what is said of it can be printed."""
    record = PluginRecord(spec.name, "acme", "1.0", "loaded", spec=spec)
    for host in HOSTS:
        found = negotiate(request, host, [record])
        json.dumps([one.as_json() for one in (*found.usable, *found.rejected)])


@examples(300)
@given(fields=given_fields(BackendSpec))
def test_specs(fields):
    found = outcome(BackendSpec, **{**FACTS, **made(fields)})
    if found[0] == "answer" and found[1].check is None:
        judge(found[1], AttentionRequest(**REQUEST))


@examples(200)
@given(facts=given_fields(BackendSpec), name=values)
def test_variants_of_specs(facts, name):
    variant = outcome(Variant, name(), **{key: value for key, value in made(facts).items() if key != "name"})
    if variant[0] == "answer":
        outcome(BackendSpec, **{**FACTS, "variants": (variant[1],)})


@examples(300)
@given(fields=given_fields(AttentionRequest))
def test_requests(fields):
    found = outcome(AttentionRequest, **{**REQUEST, **made(fields)})
    if found[0] == "answer":
        json.dumps(found[1].as_json())
        judge(BackendSpec(**FACTS), found[1])


@examples(300)
@given(facts=sensible, variants=st.lists(sensible, max_size=3))
def test_sensible_specs(facts, variants):
    """A backend runs on a host where one of its variants does, and is asked there for what that has."""
    stated = tuple(Variant(f"v{number}", **one) for number, one in enumerate(variants))
    found = outcome(BackendSpec, **{**FACTS, **facts, "variants": stated})
    if found[0] != "answer":
        return
    spec = found[1]
    record = PluginRecord(spec.name, "acme", "1.0", "loaded", spec=spec)
    for host in HOSTS:
        runs = not reasons_here(record, host)
        assert runs >= any(not reasons for reasons in reasons_by_variant(record, host).values())
        assert runs == (choose(negotiate(request_here(spec, "acme", host), host, [record])) is not None)
    for _, form in spec.by_variant:
        AttentionRequest(**_filled_in(form, {}))
        AttentionRequest(**_base(form))
