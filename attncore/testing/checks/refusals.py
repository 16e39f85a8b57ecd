"""What the spec does not declare: refused with a sentence, or right; never wrong numbers."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest
import torch

from attncore.registry.spec.sizes import MultipleOf
from attncore.show import counted
from attncore.testing.engines.run_batches import run_around_a_block
from attncore.testing.harness.covers import covers
from attncore.testing.harness.declared_samples import MAX_SIZE, edges
from attncore.testing.harness.errors import ConformanceError, NothingToRefuseError, UnsupportedError
from attncore.testing.harness.subject import Subject

if TYPE_CHECKING:
    from attncore.abstract import AttentionBackend

__all__ = [
    "test_a_refused_layer_leaves_nothing_behind",
    "test_the_largest_declared_block_id",
    "test_undeclared_features_are_refused_with_a_sentence",
    "test_undeclared_options_are_refused_with_a_sentence",
    "test_undeclared_sizes_are_refused_or_right",
]
UNDECLARED = (
    ("sliding_window", 4, "sliding_window"),
    ("logits_soft_cap", 5.0, "logits_soft_cap"),
    ("alibi_slopes", "per head", "alibi"),
    ("sinks", "per head", "sinks"),
    ("k_scale", 0.5, "kv_scales"),
    ("v_scale", 0.5, "kv_scales"),
    ("k_scale", "tensor", "kv_scales_on_device"),
    ("v_scale", "tensor per head", "kv_scales_per_head"),
    ("attn_type", "encoder", "encoder"),
    ("attn_type", "encoder_only", "encoder"),
    ("attn_type", "encoder_decoder", "encoder_decoder"),
)
"""Argument of a layer, a value, and the feature that it needs."""
MEANINGLESS: tuple[tuple[str, Any], ...] = (
    ("scale", math.nan),
    ("sliding_window", 0),
    ("logits_soft_cap", -1.0),
    ("alibi_slopes", []),
    ("sinks", []),
    ("attn_type", "no_such_type"),
)
NUM_BLOCKS = 24  # of a cache whose blocks may be large


@covers("declared block ids")
def test_the_largest_declared_block_id(attncore_subject: Subject) -> None:
    """max_block_id: a cache with one block more than it allows is refused."""
    limit = attncore_subject.form.max_block_id
    if limit is None:
        raise UnsupportedError("its spec sets no limit")
    if limit > 1 << 20:
        raise UnsupportedError(f"its limit of {limit} is too large to try")
    backend = attncore_subject.backend()
    _refused(lambda: backend.allocate_kv_cache(limit + 2), f"a cache of {counted(limit + 2, 'block')}")


@covers("clear errors", apart=True)
@pytest.mark.parametrize("field", ["head_size", "block_size"])
def test_undeclared_sizes_are_refused_or_right(attncore_subject: Subject, field: str) -> None:
    """Just beyond what is declared, past negotiation: an error with a sentence, or right numbers; never wrong ones."""
    form = attncore_subject.form
    declared = form.head_sizes if field == "head_size" else form.block_sizes
    found = edges(declared, MAX_SIZE)
    near = {found[0] - 1, found[0] + 1, found[-1] + 1, 2 * found[-1], found[0] // 2}
    if isinstance(declared, MultipleOf):
        near.add(declared.base + 1)
    beyond = sorted(size for size in near if 0 < size <= MAX_SIZE and size not in declared)[:4]
    if not beyond:
        raise NothingToRefuseError("its spec declares every size")
    for size in beyond:
        try:
            backend = attncore_subject.beyond(**{field: size})
            run_around_a_block(attncore_subject, backend, num_blocks=NUM_BLOCKS)
        except UnsupportedError:
            raise
        except ConformanceError as error:
            raise ConformanceError(
                f"{field} {size} is not declared, and gives wrong results instead of an error: {error}"
            ) from error
        except Exception as error:
            _check_sentence(error, f"{field} {size}, which is not declared,")


@covers("clear errors", apart=True)
@pytest.mark.parametrize(("argument", "value", "feature"), UNDECLARED)
def test_undeclared_features_are_refused_with_a_sentence(
    attncore_subject: Subject, argument: str, value: Any, feature: str
) -> None:
    """A layer that needs a feature which the spec does not declare is refused when it is made, naming the argument."""
    form = attncore_subject.form
    if feature in form.features or (feature == "alibi" and "alibi_standard" in form.features):
        raise NothingToRefuseError(f"its spec declares {feature}, so there is nothing to refuse")
    backend = attncore_subject.backend()
    error = _refused(lambda: _layer(backend, argument, value), f"{argument}={value}")
    if not str(error).startswith(argument):
        raise ConformanceError(f"the error for {argument}={value} does not begin with the argument's name: {error}")


@covers("clear errors", apart=True)
def test_a_refused_layer_leaves_nothing_behind(attncore_subject: Subject) -> None:
    """Neither a plan key, with which every later step would be planned, nor anything in containers of the backend's."""
    backend = attncore_subject.another()
    for argument, value in (*MEANINGLESS, *((argument, value) for argument, value, _ in UNDECLARED)):
        keys, sizes = backend.plan_keys, _sizes(backend)
        try:
            _layer(backend, argument, value)
        except Exception:
            if backend.plan_keys != keys:
                raise ConformanceError(
                    f"a layer with {argument}={value} was refused and left a plan key behind: it is registered last"
                ) from None
            changed = next((name for name, size in _sizes(backend).items() if sizes.get(name) != size), None)
            if changed is not None:
                raise ConformanceError(
                    f"a layer with {argument}={value} was refused and left something in the backend's {changed}"
                ) from None


@covers("clear errors", apart=True)
def test_undeclared_options_are_refused_with_a_sentence(attncore_subject: Subject) -> None:
    """An option that the spec does not declare is refused by name."""
    _ = attncore_subject.form  # where it cannot run, nothing is to be refused
    subject = Subject(attncore_subject.name, options={"no_such_option": 1}, host=attncore_subject.host)
    error = _refused(subject.backend, "the option no_such_option")
    if "no_such_option" not in str(error):
        raise ConformanceError(f"the error does not name the option: {error}")


def _layer(backend: AttentionBackend, argument: str, value: Any) -> None:
    meant = {
        "per head": [0.5] * backend.config.num_heads,
        "tensor": torch.tensor(0.5),
        "tensor per head": torch.tensor([0.5] * backend.config.num_kv_heads),
    }
    given: dict[str, Any] = {argument: meant.get(value, value) if isinstance(value, str) else value}
    backend.impl("layers.0", **{"scale": 1.0, **given})


def _sizes(backend: AttentionBackend) -> dict[str, int]:
    """How many entries each container among the backend's attributes has."""
    return {name: len(held) for name, held in vars(backend).items() if isinstance(held, (dict, list, set, tuple))}


def _refused(call: Callable[[], object], what: str) -> Exception:
    try:
        call()
    except Exception as error:
        _check_sentence(error, what)
        return error
    raise ConformanceError(f"{what} was accepted; it must be refused with an error that says why")


def _check_sentence(error: Exception, what: str) -> None:
    if len(str(error).split()) < 3:
        raise ConformanceError(f"{what} was refused by a bare {type(error).__name__}({str(error)!r}); say what and why")
