"""What tests of declared settings that are crossed share: which there are, and how an error says what was crossed."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager

from attncore.abstract import AttentionBackend
from attncore.testing.harness.declared_samples import edges
from attncore.testing.harness.errors import ConformanceError, UnsupportedError, told
from attncore.testing.harness.subject import Subject

_MOST_VALUES = 256


def require_declared(asked: str, declared: Collection[str]) -> None:
    """UnsupportedError unless ``asked`` is among what a spec has ``declared``."""
    if asked not in declared:
        raise UnsupportedError("its spec does not declare it")


def require_another(asked: str, base: str | None) -> None:
    """UnsupportedError where what is ``asked`` is the base request's."""
    if asked == base:
        raise UnsupportedError("other tests of captured sizes run with it")


def value_head(subject: Subject) -> int:
    """A declared size of values that is not the query's; UnsupportedError where there is none."""
    form, base = subject.form, subject.request().head_size
    if form.head_size_v is None or form.mla_only:
        raise UnsupportedError("its spec declares no size of values but the query's")
    others = [size for size in edges(form.head_size_v, _MOST_VALUES) if size != base]
    smaller = [size for size in others if size < base]
    if not others:
        raise UnsupportedError("its spec declares no size of values but the query's")
    return max(smaller) if smaller else min(others)


def features_of(backend: AttentionBackend) -> Collection[str]:
    """What the variant declares that was chosen: for another dtype it may be another than the base request's."""
    return () if backend.spec is None else backend.spec.features


@contextmanager
def named(*what: str) -> Iterator[None]:
    """Errors begin with what is crossed."""
    try:
        yield
    except UnsupportedError:
        raise
    except Exception as error:
        worst = error.max_error if isinstance(error, ConformanceError) else None
        raise ConformanceError(f"with {' and '.join(what)}: {told(error)}", worst) from error
