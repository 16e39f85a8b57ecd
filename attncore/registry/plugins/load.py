"""Loading plugins in this process: each plugin's light module is imported and its spec read. None stops another.

Loading runs the plugin's code; which plugins may load is decided before, in ``discover``. A plugin that hangs on import
hangs the caller; `attncore doctor` loads each in a child process instead.
"""

from __future__ import annotations

import logging
import sys
from dataclasses import replace
from types import FrameType
from typing import Any, NamedTuple

from attncore import env
from attncore._version import __version__
from attncore.did_you_mean import close_name
from attncore.errors import PluginError
from attncore.how_to_install import install_required
from attncore.logged import logged
from attncore.quoted import add_note, describe_error, json_value, one_line, type_name
from attncore.registry import package_requirements
from attncore.registry.plugins import discover
from attncore.registry.plugins.plugin_code import one_thread, run_plugin_code
from attncore.registry.plugins.plugin_record import PluginRecord
from attncore.registry.reasons import Reason
from attncore.registry.spec.backend_spec import ATTNCORE_API, BackendSpec, ContractVersionError, plain_spec

HEAVY_MODULES = ("torch", "triton", "flashinfer", "flash_attn", "aiter", "jax", "tensorflow", "cupy", "numba")
"""What a spec must not import."""

HOOKS = ("attncore_backend", "attncore_doctor")
logger = logging.getLogger(__name__)


class Registry(NamedTuple):
    """Every plugin's record, and the installed versions of the distributions that their specs require."""

    records: tuple[PluginRecord, ...]
    packages: dict[str, str]


_cache: dict[tuple[Any, ...], Registry] = {}


def registry() -> Registry:
    """The plugins of this process; loaded once for each setting of the variables and of ``sys.path``.

    Raises ValueError naming the variable for a bad setting, and PluginError for the first plugin that fails under
    ``ATTNCORE_STRICT_PLUGINS=1``, where another thread loads plugins without end, and in a plugin that is being loaded.
    """
    with one_thread():  # the settings, too, are read within it: a plugin may change them until it is loaded
        if asker := _asker():
            raise PluginError(
                f"plugins: {asker} asks for the backends while plugins are loaded, which would load it again and "
                "again; ask when a backend is created, not when its plugin is imported or its spec is read"
            )
        folders = tuple(folder for folder in sys.path if isinstance(folder, str))
        key = (env.plugins(), env.disabled_plugins(), env.strict_plugins(), folders)
        if key not in _cache:
            records = tuple(load(record, strict=key[2]) for record in discover.find())
            specs = [record.spec for record in records if record.spec is not None]
            names = {package_requirements.parse(text).name for spec in specs for text in spec.all_requires}
            _cache[key] = Registry(records, package_requirements.installed(tuple(sorted(names))))
        return _cache[key]


def _asker() -> str:
    """The plugin whose loading in this thread has come here, or what else has while they are found; mostly empty.

    It is asked of the stack: a variable would stay set where an interrupt comes before it is taken back.
    """
    loading: FrameType | None = sys._getframe(2)
    while loading is not None and loading.f_code not in (load.__code__, registry.__code__):
        loading = loading.f_back
    if loading is None:
        return ""
    record = loading.f_locals.get("record")
    return record.label if isinstance(record, PluginRecord) else "something in sys.meta_path"


def forget() -> None:
    """Drop the cached plugins, so that the next call finds what has been installed since."""
    _cache.clear()


def load(record: PluginRecord, *, strict: bool = False) -> PluginRecord:
    """The record with its plugin loaded, or with the reason why it cannot be.

    Whatever a plugin raises, SystemExit too, is a reason of its record. Only KeyboardInterrupt passes, which is the
    user's; a note says which plugin it met. ``strict`` raises PluginError for a record that is a duplicate, broken or
    incompatible.
    """
    if record.state == "found":
        heavy = {name for name in HEAVY_MODULES if name in sys.modules}
        try:
            spec = run_plugin_code(record.label, _spec, record)
        except KeyboardInterrupt as error:
            add_note(error, f"while {record.name} ({record.label}) was loaded")
            raise
        except BaseException as error:
            record = run_plugin_code(record.label, _failed, record, error)  # its text is code of the plugin
        else:
            record = replace(record, state="loaded", spec=spec, reasons=_heavy_imports(record, heavy))
    if strict and record.state in ("duplicate", "broken", "incompatible"):
        raise PluginError(f"{record.name} ({record.label}): {record.reasons[0]}") from record.error
    return record


def _spec(record: PluginRecord) -> BackendSpec:
    """The plugin's spec, read once into one of our own: after this, code of the plugin runs in its hooks alone."""
    import pluggy

    from attncore.registry.plugins.hookspecs import PROJECT, Hooks

    if record.entry_point is None:
        raise ValueError("the record has no entry point")
    plugin = record.entry_point.load()
    manager = pluggy.PluginManager(PROJECT)
    manager.add_hookspecs(Hooks)
    manager.register(plugin, name=record.name)
    _check_names(manager, plugin, record)
    answers = manager.hook.attncore_backend()
    if len(answers) != 1:
        raise TypeError(f"{_target(record)} answers attncore_backend with nothing; it must return a BackendSpec")
    spec = answers[0]
    api = getattr(spec, "api", ATTNCORE_API)  # an object that is no BackendSpec may be one of another attncore
    if type(api) is int and api != ATTNCORE_API:
        raise ContractVersionError(api)
    if not isinstance(spec, BackendSpec):
        raise TypeError(f"attncore_backend returned a {type_name(spec)}; it must return a BackendSpec")
    spec = plain_spec(spec)
    if spec.name != record.name:
        raise ValueError(f"name: the spec says {spec.name!r}, the entry point {record.name!r}; they must be equal")
    return spec


def _check_names(manager: Any, plugin: Any, record: PluginRecord) -> None:
    """TypeError for an implemented hook that attncore does not have, and for a missing or undecorated one."""
    import pluggy

    try:
        manager.check_pending()
    except pluggy.PluginValidationError:
        known = set(HOOKS)
        for name in dir(plugin):
            if name not in known and manager.parse_hookimpl_opts(plugin, name) is not None:
                close = close_name(name, HOOKS)
                hint = f"did you mean {close}?" if close else f"the hooks are {', '.join(HOOKS)}"
                raise TypeError(f"{_target(record)} implements {name}, which is no hook of attncore; {hint}") from None
        raise
    if not manager.hook.attncore_backend.get_hookimpls():
        if hasattr(plugin, "attncore_backend"):
            raise TypeError(
                f"attncore_backend of {_target(record)} is not decorated; decorate it with @attncore.hookimpl"
            )
        raise TypeError(
            f"{_target(record)} implements no attncore_backend; define it, decorated with @attncore.hookimpl"
        )


def _target(record: PluginRecord) -> str:
    """The module that the entry point names."""
    return one_line(record.entry_point.value) if record.entry_point else record.name


def _failed(record: PluginRecord, error: BaseException) -> PluginRecord:
    if type(error) is ContractVersionError and type(error.api) is int:
        reason = _other_contract(record, error.api)
    elif type(error) is ModuleNotFoundError and error.name == "pluggy":
        reason = Reason(
            "broken",
            "pluggy is not installed, by which attncore calls the hooks of plugins",
            asked="pluggy",
            source=f"attncore {__version__}",
            fix=install_required("pluggy"),
        )
    else:
        reason = Reason(
            "broken",
            f"{_target(record)} failed: {describe_error(error)}",
            asked=_target(record),
            source=record.label,
            fix=f"update {record.distribution}, or report it to its authors",
        )
    logged(logger, logging.DEBUG, "plugin %s (%s) is %s", record.name, record.label, reason.code, error=error)
    return replace(record, state=reason.code, reasons=(reason,), error=error)


def _other_contract(record: PluginRecord, api: int) -> Reason:
    older = api < ATTNCORE_API
    version = record.version
    while version.endswith(".0"):
        version = version[:-2]
    return Reason(
        "incompatible",
        f"built for contract {json_value(api)}; this attncore speaks {ATTNCORE_API}",
        asked=api,
        accepted=ATTNCORE_API,
        source=f"attncore {__version__}",
        fix=f"install {record.distribution}{'>' if older else '<'}{version}",
    )


def _heavy_imports(record: PluginRecord, before: set[str]) -> tuple[Reason, ...]:
    """A warning where reading the spec has imported heavy modules that were not loaded ``before``."""
    new = sorted(name for name in HEAVY_MODULES if name in sys.modules and name not in before)
    if not new:
        return ()
    reason = Reason(
        "heavy_import",
        f"{_target(record)} imports {', '.join(new)} when its spec is read",
        asked=new,
        accepted=[],
        source=record.label,
        fix="import them in the factory's module only",
    )
    return (reason,)
