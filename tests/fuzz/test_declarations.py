"""Specs of plugins and requests with fields of any kind: made, or refused in words that begin with the field."""

import dataclasses
import json

from fuzz.budget import examples
from fuzz.hostile import fixed, mappings, objects
from fuzz.outcomes import outcome
from hypothesis import given
from hypothesis import strategies as st
from registry.test_spec import FACTS

from attncore import AttentionRequest, BackendSpec, MultipleOf, Variant
from attncore.registry.choice.negotiate import negotiate
from attncore.registry.host.host import Host
from attncore.registry.plugins.plugin_record import PluginRecord

REQUEST = {"num_heads": 8, "num_kv_heads": 2, "head_size": 64, "dtype": "bfloat16"}
values = st.one_of(
    objects,
    st.sampled_from(mappings("cpu")),
    st.sampled_from(["", "x\ny", "../x", "a" * 999, MultipleOf(8)]).map(fixed),
)


HOSTS = [Host.assume("cpu"), Host.assume("cuda:sm_90"), Host.assume("rocm:gfx942")]


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
