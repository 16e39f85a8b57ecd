"""The spec: that it loads, is light, and is honest at the edges of what it declares and just beyond."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import pytest

from attncore.abstract import AttentionBackend, AttentionImpl
from attncore.registry.plugins.load import HEAVY_MODULES
from attncore.registry.spec.sizes import MultipleOf
from attncore.testing.checks.features import edges
from attncore.testing.engines.engine import Engine, run_rows
from attncore.testing.harness.covers import covers
from attncore.testing.harness.errors import ConformanceError, UnsupportedError, told
from attncore.testing.harness.subject import Subject

__all__ = [
    "test_largest_declared_group",
    "test_smallest_and_largest_declared_block_sizes",
    "test_smallest_and_largest_declared_head_sizes",
    "test_the_factory_makes_the_backend",
    "test_the_largest_declared_block_id",
    "test_the_plugin_loads",
    "test_the_spec_is_read_without_heavy_imports",
    "test_undeclared_features_are_refused_with_a_sentence",
    "test_undeclared_options_are_refused_with_a_sentence",
    "test_undeclared_sizes_are_refused_or_right",
    "test_usual_block_sizes_that_are_declared",
    "test_usual_head_sizes_that_are_declared",
]
MOST = 512  # sizes of heads and blocks beyond this are not probed: the arithmetic of a kernel has changed long before
USUAL_HEAD_SIZES = (24, 40, 48, 64, 72, 80, 96, 112, 128, 160, 192, 256)  # of models that are served
USUAL_BLOCK_SIZES = (16, 24, 32, 48, 64, 128, 256)
WHOLE = 32  # a finite set of at most so many sizes is probed whole
SHORT = 64  # larger blocks take a backend that only decodes, token by token, too long to fill several times
FEW = 16  # blocks of a cache whose blocks may be large
_LIGHT = """
import sys
from attncore.registry.plugins import discover, load
records = [record for record in discover.find() if record.name == {name!r} and record.state == "found"]
heavy = {heavy!r}
print(",".join(name for name in heavy if name in sys.modules), end=";")
records = [load.load(record) for record in records]
print(",".join(name for name in heavy if name in sys.modules), end=";")
print(",".join(record.state for record in records))
"""


@covers("spec")
def test_the_plugin_loads(attncore_subject: Subject) -> None:
    """The record is ``loaded``, without a warning."""
    try:
        record = attncore_subject.record
    except UnsupportedError as error:  # every other test is skipped for it, so one has to fail
        raise ConformanceError(str(error)) from error
    if record.state != "loaded":
        raise ConformanceError(f"the plugin is {record.state}: " + "; ".join(map(str, record.reasons)))
    # A heavy import shows only where nothing had imported that module before: the test of laziness always tells.


@covers("laziness")
def test_the_spec_is_read_without_heavy_imports(attncore_subject: Subject) -> None:
    """In a fresh process, listing imports nothing of the plugin, and its spec imports no heavy library."""
    script = _LIGHT.format(name=attncore_subject.name, heavy=HEAVY_MODULES)
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=120, env=environ, check=False
    )
    if done.returncode:
        raise ConformanceError(f"reading the spec in a process of its own failed: {done.stderr.strip()[-2000:]}")
    listed, spec, states = done.stdout.strip().rpartition("\n")[2].split(";")
    if listed:
        raise ConformanceError(f"listing alone imported {listed}")
    if spec:
        raise ConformanceError(f"reading the spec imported {spec}: import it in the factory's module only")
    if states != "loaded":
        raise ConformanceError(f"in a process of its own the plugin is {states or 'not there'}")


@covers("spec")
def test_the_factory_makes_the_backend(attncore_subject: Subject) -> None:
    """What the spec's factory makes has the spec's name and an impl_class, and keeps the configuration."""
    backend: Any = attncore_subject.backend()
    if not isinstance(backend, AttentionBackend) or backend.name != attncore_subject.name:
        raise ConformanceError(f"the factory made {backend!r} named {backend.name!r}, not {attncore_subject.name!r}")
    if not issubclass(getattr(type(backend), "impl_class", object), AttentionImpl):
        raise ConformanceError("the class attribute impl_class must be a subclass of attncore.AttentionImpl")
    impl = backend.impl("layers.7", scale=0.25)
    if not isinstance(impl, AttentionImpl) or (impl.layer_name, impl.scale) != ("layers.7", 0.25):
        raise ConformanceError("backend.impl must make an AttentionImpl that keeps layer_name and scale")
    if impl.backend is not backend:
        raise ConformanceError("an AttentionImpl must keep the backend that made it, as `backend`")


@covers("declared head sizes")
def test_smallest_and_largest_declared_head_sizes(attncore_subject: Subject) -> None:
    """The edges of head_sizes give right numbers."""
    _probe(attncore_subject, "head_size", edges(attncore_subject.form.head_sizes, MOST))


@covers("declared block sizes")
def test_smallest_and_largest_declared_block_sizes(attncore_subject: Subject) -> None:
    """The edges of block_sizes, and the preferred one, give right numbers."""
    form = attncore_subject.form
    chosen = {*edges(form.block_sizes, MOST), *([form.preferred_block_size] if form.preferred_block_size else [])}
    _probe(attncore_subject, "block_size", sorted(chosen))


@covers("declared head sizes")
def test_usual_head_sizes_that_are_declared(attncore_subject: Subject) -> None:
    """The head sizes of models that are served, between the edges of head_sizes; a finite set whole."""
    between = _between(attncore_subject.form.head_sizes, USUAL_HEAD_SIZES)
    _probe(attncore_subject, "head_size", between, small=True)


@covers("declared block sizes")
def test_usual_block_sizes_that_are_declared(attncore_subject: Subject) -> None:
    """The block sizes that engines use, between the edges of block_sizes; a finite set whole."""
    between = _between(attncore_subject.form.block_sizes, USUAL_BLOCK_SIZES)
    _probe(attncore_subject, "block_size", between, small=True)


@covers("declared groups")
def test_largest_declared_group(attncore_subject: Subject) -> None:
    """As many query heads per key/value head as max_group_size says; 16 where it sets no limit."""
    group = min(attncore_subject.form.max_group_size or 16, 64)
    backend = attncore_subject.backend(num_heads=group, num_kv_heads=1)
    run_rows(Engine(backend), attncore_subject.around_a_block(backend.config.block_size))


@covers("declared block ids")
def test_the_largest_declared_block_id(attncore_subject: Subject) -> None:
    """max_block_id: a cache with one block more than it allows is refused."""
    limit = attncore_subject.form.max_block_id
    if limit is None:
        raise UnsupportedError("its spec sets no limit")
    if limit > 1 << 20:
        raise UnsupportedError(f"its limit of {limit} is too large to try")
    backend = attncore_subject.backend()
    _refused(lambda: backend.allocate_kv_cache(limit + 1), f"a cache of {limit + 1} blocks and a sink")


@covers("clear errors")
@pytest.mark.parametrize("field", ["head_size", "block_size"])
def test_undeclared_sizes_are_refused_or_right(attncore_subject: Subject, field: str) -> None:
    """Just beyond what is declared, past negotiation: an error with a sentence, or right numbers; never wrong ones."""
    form = attncore_subject.form
    declared: Any = form.head_sizes if field == "head_size" else form.block_sizes
    found = edges(declared, MOST)
    near = {found[0] - 1, found[0] + 1, found[-1] + 1, 2 * found[-1], found[0] // 2}
    if isinstance(declared, MultipleOf):
        near.add(declared.base + 1)
    beyond = sorted(size for size in near if 0 < size <= MOST and size not in declared)[:4]
    if not beyond:
        raise UnsupportedError("its spec declares every size")
    for size in beyond:
        try:
            backend = attncore_subject.beyond(**{field: size})
            run_rows(Engine(backend, num_blocks=FEW), attncore_subject.around_a_block(backend.config.block_size))
        except UnsupportedError:
            raise
        except ConformanceError as error:
            raise ConformanceError(
                f"{field} {size} is not declared, and gives wrong results instead of an error: {error}"
            ) from error
        except Exception as error:
            _check_sentence(error, f"{field} {size}, which is not declared,")


@covers("clear errors")
@pytest.mark.parametrize(
    ("argument", "value", "feature"),
    [
        ("sliding_window", 4, "sliding_window"),
        ("logits_soft_cap", 5.0, "logits_soft_cap"),
        ("alibi_slopes", "per head", "alibi"),
        ("sinks", "per head", "sinks"),
        ("k_scale", 0.5, "kv_scales"),
        ("v_scale", 0.5, "kv_scales"),
        ("attn_type", "encoder", "encoder"),
        ("attn_type", "encoder_only", "encoder"),
        ("attn_type", "encoder_decoder", "encoder_decoder"),
    ],
)
def test_undeclared_features_are_refused_with_a_sentence(
    attncore_subject: Subject, argument: str, value: Any, feature: str
) -> None:
    """A layer that needs a feature which the spec does not declare is refused when it is made, naming the argument."""
    form = attncore_subject.form
    if feature in form.features or (feature == "alibi" and "alibi_standard" in form.features):
        raise UnsupportedError(f"its spec declares {feature}, so there is nothing to refuse")
    backend = attncore_subject.backend()
    given: dict[str, Any] = {argument: [0.5] * backend.config.num_heads if value == "per head" else value}
    error = _refused(lambda: backend.impl("layers.0", scale=1.0, **given), f"{argument}={value}")
    if not str(error).startswith(argument):
        raise ConformanceError(f"the error for {argument}={value} does not begin with the argument's name: {error}")


@covers("clear errors")
def test_undeclared_options_are_refused_with_a_sentence(attncore_subject: Subject) -> None:
    """An option that the spec does not declare is refused by name."""
    _ = attncore_subject.form  # where it cannot run, nothing is to be refused
    subject = Subject(attncore_subject.name, options={"no_such_option": 1}, host=attncore_subject.host)
    error = _refused(subject.backend, "the option no_such_option")
    if "no_such_option" not in str(error):
        raise ConformanceError(f"the error does not name the option: {error}")


def _between(declared: Any, usual: tuple[int, ...]) -> list[int]:
    """Declared sizes that ``edges`` leaves out: the usual ones, and all of a small set."""
    found = {size for size in usual if size in declared}
    if not isinstance(declared, MultipleOf) and len(declared) <= WHOLE:
        found = {size for size in declared if size <= MOST}
    found -= set(edges(declared, MOST))
    if not found:
        raise UnsupportedError("its spec declares no usual size but those at the edges")
    return sorted(found)


def _probe(subject: Subject, field: str, chosen: list[int], *, small: bool = False) -> None:
    """Every declared size must work; one that a check of the plugin's own refuses has its reason, and is left out.

    ``small``: by one request a phase, over the edge of a block.
    """
    refused = []
    for size in chosen:
        try:
            backend = subject.backend(**{field: size})
        except UnsupportedError as error:
            refused.append(f"{field} {size}: {error}")
            continue
        try:
            block, phases = backend.config.block_size, subject.form.phases
            batch = [(block - 1, 2)] * ("prefill" in phases) + [(block, 1)] * ("decode" in phases)
            if not small and ("prefill" in phases or block <= SHORT):
                batch = subject.around_a_block(block)
            run_rows(Engine(backend, num_blocks=FEW), batch)
        except Exception as error:
            raise ConformanceError(f"the spec declares {field} {size}, but: {told(error)}") from error
    if len(refused) == len(chosen):
        raise UnsupportedError("; ".join(refused))


def _refused(call: Any, what: str) -> Exception:
    try:
        call()
    except Exception as error:
        _check_sentence(error, what)
        return error
    raise ConformanceError(f"{what} was accepted; it must be refused with an error that says why")


def _check_sentence(error: Exception, what: str) -> None:
    if len(str(error).split()) < 3:
        raise ConformanceError(f"{what} was refused by a bare {type(error).__name__}({str(error)!r}); say what and why")
