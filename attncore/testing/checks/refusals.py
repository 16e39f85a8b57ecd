"""What the spec does not declare: refused with a sentence, or right; never wrong numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from attncore.registry.spec.sizes import MultipleOf
from attncore.testing.engines.run_batches import run_around_a_block
from attncore.testing.harness.covers import covers
from attncore.testing.harness.declared_samples import MAX_SIZE, edges
from attncore.testing.harness.errors import ConformanceError, NothingToRefuseError, UnsupportedError
from attncore.testing.harness.subject import Subject

__all__ = [
    "test_the_largest_declared_block_id",
    "test_undeclared_features_are_refused_with_a_sentence",
    "test_undeclared_options_are_refused_with_a_sentence",
    "test_undeclared_sizes_are_refused_or_right",
]
NUM_BLOCKS = 16  # of a cache whose blocks may be large


@covers("declared block ids")
def test_the_largest_declared_block_id(attncore_subject: Subject) -> None:
    """max_block_id: a cache with one block more than it allows is refused."""
    limit = attncore_subject.form.max_block_id
    if limit is None:
        raise UnsupportedError("its spec sets no limit")
    if limit > 1 << 20:
        raise UnsupportedError(f"its limit of {limit} is too large to try")
    backend = attncore_subject.backend()
    _refused(lambda: backend.allocate_kv_cache(limit + 2), f"a cache of {limit + 2} blocks")


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
@pytest.mark.parametrize(
    ("argument", "value", "feature"),
    [
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
    ],
)
def test_undeclared_features_are_refused_with_a_sentence(
    attncore_subject: Subject, argument: str, value: Any, feature: str
) -> None:
    """A layer that needs a feature which the spec does not declare is refused when it is made, naming the argument."""
    form = attncore_subject.form
    if feature in form.features or (feature == "alibi" and "alibi_standard" in form.features):
        raise NothingToRefuseError(f"its spec declares {feature}, so there is nothing to refuse")
    backend = attncore_subject.backend()
    meant = {
        "per head": [0.5] * backend.config.num_heads,
        "tensor": torch.tensor(0.5),
        "tensor per head": torch.tensor([0.5] * backend.config.num_kv_heads),
    }
    given: dict[str, Any] = {argument: meant.get(value, value)}
    error = _refused(lambda: backend.impl("layers.0", scale=1.0, **given), f"{argument}={value}")
    if not str(error).startswith(argument):
        raise ConformanceError(f"the error for {argument}={value} does not begin with the argument's name: {error}")


@covers("clear errors", apart=True)
def test_undeclared_options_are_refused_with_a_sentence(attncore_subject: Subject) -> None:
    """An option that the spec does not declare is refused by name."""
    _ = attncore_subject.form  # where it cannot run, nothing is to be refused
    subject = Subject(attncore_subject.name, options={"no_such_option": 1}, host=attncore_subject.host)
    error = _refused(subject.backend, "the option no_such_option")
    if "no_such_option" not in str(error):
        raise ConformanceError(f"the error does not name the option: {error}")


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
