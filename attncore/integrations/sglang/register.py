"""The names under which SGLang finds attncore's backends. SGLang calls ``register`` by its entry point."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any

from attncore.logged import logged
from attncore.quoted import describe_error, one_line

NAME = "attncore"
"""Attncore's own choice among the installed backends."""

VERSIONS = ("0.5.23",)
"""The versions of SGLang that the bridge is written for and tested with."""

_logger = logging.getLogger("attncore")


def register() -> None:
    """Adds ``attncore`` and ``attncore_<name>`` to SGLang's attention backends, for targets and drafts.

    A name is added for each plugin that is found, whatever its state: the reasons against it are an error where it is
    named, and stop nothing where it is not. A second call adds nothing. It never raises: what is wrong, such as an
    SGLang whose registry is elsewhere, is logged, and SGLang starts with backends of its own.
    """
    try:
        _register()
    except Exception as error:
        logged(_logger, logging.WARNING, "its backends are not known to SGLang: %s", describe_error(error))


def _register() -> None:
    from sglang.srt.arg_groups import choices
    from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS, register_attention_backend

    for name in names(_installed()):
        if name in ATTENTION_BACKENDS:
            continue
        register_attention_backend(name)(_maker(name))
        choices.add_attention_backend_choices([name])
        choices.add_draft_attention_backend_choices([name])


def names(installed: Iterable[str]) -> tuple[str, ...]:
    """SGLang's names: attncore's choice, and one for each backend."""
    return (NAME, *(f"{NAME}_{name}" for name in dict.fromkeys(installed)))


def refused_version(version: str) -> str | None:
    """Why the bridge does not run in this version of SGLang; None where it does."""
    if version in VERSIONS:
        return None
    return (
        f"SGLang {one_line(version, 40)} found; attncore's bridge is for SGLang {', '.join(VERSIONS)}: install that "
        "version, or an attncore whose docs/engines.md names this one, or choose another --attention-backend"
    )


def _installed() -> tuple[str, ...]:
    """Names of the backends that are found or known; none, and a warning, where they cannot be listed.

    No plugin is imported: one that hangs or crashes would end every process of an SGLang that runs its own backends.
    """
    try:
        from attncore.registry.plugins.discover import find
        from attncore.registry.plugins.known_backends import KNOWN

        return (*(record.name for record in find()), *KNOWN)  # one that is not installed is an error that says so
    except Exception as error:  # SGLang starts with its own backends all the same
        logged(_logger, logging.WARNING, "the installed backends cannot be listed: %s", describe_error(error))
        return ()


def _maker(name: str) -> Any:
    """What SGLang calls with its model runner to make the backend ``name``."""

    def make(runner: Any) -> Any:
        import sglang

        if (refused := refused_version(sglang.__version__)) is not None:
            raise RuntimeError(refused)
        from attncore.integrations.sglang.attention_backend import AttncoreAttentionBackend

        return AttncoreAttentionBackend(runner, name.removeprefix(NAME).removeprefix("_") or None)

    return make
