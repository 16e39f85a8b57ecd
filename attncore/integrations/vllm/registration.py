"""What vLLM calls when it starts: attncore's backends become backends of vLLM."""

from __future__ import annotations

import logging
from typing import Any

from attncore.integrations.vllm import names
from attncore.integrations.vllm.versions import installed_version, version_problem
from attncore.quoted import describe_error

logger = logging.getLogger(__name__)


def register() -> None:
    """Registers a name for each installed attncore backend, and ``CUSTOM`` where nothing else has taken it.

    vLLM calls it in each process, perhaps more than once. It never raises: an attncore, or a plugin of it, that cannot
    be loaded must not keep vLLM from starting with a backend of its own. What is wrong is logged, and is an error where
    the user names the backend.
    """
    try:
        _register()
    except Exception as error:
        logger.warning("attncore: its backends are not known to vLLM: %s", describe_error(error))


def _register() -> None:
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    if problem := version_problem(installed_version()):
        logger.warning("%s; naming one of attncore's backends is an error", problem)
    names.pickle_by_name()
    for name, backends in _by_name().items():
        if len(backends) > 1:
            logger.warning("attncore: %s would all be %s in vLLM; none of them is", " and ".join(backends), name)
            continue
        try:
            names.member(name)
        except Exception as error:
            logger.warning("attncore: vLLM does not take the name %s: %s", name, describe_error(error))
    custom: Any = AttentionBackendEnum.CUSTOM
    if not custom.is_overridden():
        register_backend(custom, f"{names.CLASSES}.{names.CUSTOM}")


def _by_name() -> dict[str, list[str]]:
    """Name in vLLM -> the attncore backends that would have it. Broken plugins have one, too, for their reasons.

    No plugin is imported: one that hangs or crashes would end every process of a vLLM that runs its own backends.
    """
    from attncore.registry.plugins.discover import find
    from attncore.registry.plugins.known_backends import KNOWN

    found: dict[str, list[str]] = {}
    records = list(find())
    for backend in sorted({*KNOWN, *(record.name for record in records if record.state != "broken")}):
        found.setdefault(names.member_name(backend), []).append(backend)
    for record in records:  # a name that is none, such as ACME, takes none from acme
        if record.state == "broken":
            found.setdefault(names.member_name(record.name), [record.name])
    return found
