"""Every value of every option that the spec declares, one option at a time, in a few steps each."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from attncore.quoted import quoted
from attncore.testing.engines.captured_engine import CapturedEngine
from attncore.testing.engines.engine import Engine
from attncore.testing.engines.reading_engine import ReadingEngine
from attncore.testing.engines.run_batches import run_around_a_block
from attncore.testing.harness.covers import covers
from attncore.testing.harness.errors import (
    ConformanceError,
    NothingToRefuseError,
    NotRunError,
    UnsupportedError,
    text_of,
    told,
)
from attncore.testing.harness.subject import Subject

__all__ = ["test_each_value_of_each_option", "test_values_that_check_refuses_are_refused_by_create"]
MOST = 64
"""Values that are tried."""
CAPTURED_STEPS = 4
ODD: Mapping[type, tuple[Any, ...]] = {
    int: (-1, 0, 1, 3, 2**31, 2**40), float: (-1.0, 0.0, 1e30), str: ("", "no such value"),
}  # fmt: skip
"""Values of options without choices that a check may well refuse."""
SHARING, PREFIX = 9, 256
"""Requests that share a prefix, and its tokens: as many as the usual rule of two passes (CascadeRule) asks for."""


@covers("options")
def test_each_value_of_each_option(attncore_subject: Subject) -> None:
    """The values but the default, with which every other test runs: prompts, chunks, decodes, all mixed, requests that
    share a prefix, with and without writing; a captured size where graphs are declared. Not where options are given:
    these are what is to be tried. What a value refuses on this machine is left out."""
    if attncore_subject.options:
        raise NothingToRefuseError("the options are given")
    values = list(_values(attncore_subject))
    if not values:
        raise NothingToRefuseError("its spec declares no option of several values")
    refused = []
    for name, value in values:
        subject = attncore_subject.with_options({name: value})
        try:
            _short_run(subject)
        except NotRunError:
            raise
        except UnsupportedError as error:
            refused.append(f"{name}={value}: {error}")
        except Exception as error:
            said = text_of(error) if isinstance(error, ConformanceError) else told(error)
            size = error.max_error if isinstance(error, ConformanceError) else None
            raise ConformanceError(f"with option {name}={value}: {said}", size) from error
    if len(refused) == len(values):
        raise UnsupportedError("; ".join(refused))


@covers("options", apart=True)
def test_values_that_check_refuses_are_refused_by_create(attncore_subject: Subject) -> None:
    """What the spec's ``check`` refuses in a request is refused by ``Choice.create(options=...)``, too, which does not
    ask ``check``: by the class, with a ValueError that begins with ``options`` and names the option."""
    if attncore_subject.options:
        raise NothingToRefuseError("the options are given")
    choice = attncore_subject.choice()
    tried = 0
    for name, option in choice.spec.options.items():
        for value in (*option.choices, *((False, True) if option.type is bool else ODD.get(option.type, ())))[:MOST]:
            why = None if option.problem(value) else attncore_subject.refused_by_check({name: value})
            if why is None:
                continue
            tried += 1
            given = f"option {name}={quoted(value)}: check refuses it ({why}), and Choice.create(options=...)"
            try:
                choice.create(attncore_subject.device, {name: value})
            except ValueError as error:
                said = text_of(error)
                if not said.startswith("options") or name not in said:
                    raise ConformanceError(
                        f"{given} by an error that does not begin with options and name it: {said}"
                    ) from error
            except Exception as error:
                raise ConformanceError(f"{given} by another error than a ValueError: {told(error)}") from error
            else:
                raise ConformanceError(f"{given} takes it: create does not ask check, so the class refuses it, too")
    if not tried:
        raise NothingToRefuseError("its check refuses no value of an option")


def _values(subject: Subject) -> Iterator[tuple[str, Any]]:
    """Option and value, the first MOST; those of any variant, each once."""
    options = {name: option for _, form in subject.spec.by_variant for name, option in form.options.items()}
    found = [
        (name, value)
        for name, option in options.items()
        for value in ((False, True) if option.type is bool else option.choices)
        if value != option.default
    ]
    yield from found[:MOST]


def _short_run(subject: Subject) -> None:
    backend = subject.backend()
    run_around_a_block(subject, backend)
    if subject.form.mla_only or len(subject.form.phases) == 1:
        return
    _share_a_prefix(Engine(backend, num_blocks=_room(backend.config.block_size)))
    _share_a_prefix(ReadingEngine(backend, written_by="write_cache", num_blocks=_room(backend.config.block_size)))
    if subject.form.cuda_graph != "never":
        engine = CapturedEngine(backend, 1)
        for _ in range(CAPTURED_STEPS):
            engine.change()
            engine.replayed()


def _room(block_size: int) -> int:
    return PREFIX // block_size + 2 * (SHARING + 2)


def _share_a_prefix(engine: Engine) -> None:
    """Decodes and chunks of requests whose tables begin with the same blocks."""
    blocks = -(-PREFIX // engine.block_size)
    tokens = blocks * engine.block_size
    engine.add("first", tokens + 3)
    engine.fill({"first": tokens + 1})
    for name in range(SHARING):
        engine.add(name, tokens + 3, prefix_of="first", prefix_blocks=blocks)
    engine.step({name: 1 + name % 3 for name in range(SHARING)} | {"first": 1})
