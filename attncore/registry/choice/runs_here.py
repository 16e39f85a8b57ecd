"""Whether an installed backend can run on a host at all, whatever the model: what `list` and `doctor` say of each."""

from __future__ import annotations

from attncore.kernels import lacking_kernels
from attncore.quoted import listed
from attncore.registry.choice.fitting_variant import fitting_variant, stated_by
from attncore.registry.choice.reasons_against import reasons_against
from attncore.registry.device_patterns import best_match, without_contained
from attncore.registry.host.host import Host
from attncore.registry.plugins.plugin_record import PluginRecord
from attncore.registry.reasons import USE_ANOTHER, Reason
from attncore.registry.request import AttentionRequest
from attncore.registry.spec.backend_spec import BackendSpec
from attncore.registry.spec.fitting_fields import fitting_fields


def plain_request(spec: BackendSpec) -> AttentionRequest:
    """One head, and otherwise what ``spec`` declares; it names the backend."""
    return AttentionRequest(num_heads=1, num_kv_heads=1, backend=spec.name, **fitting_fields(spec))


def request_here(spec: BackendSpec, plugin: str, host: Host) -> AttentionRequest:
    """The first of its variants' plain requests that ``spec`` can serve on ``host``; the first where it serves none."""
    requests = [plain_request(stated) for _, stated in spec.by_variant]
    return next((one for one in requests if not fitting_variant(spec, plugin, one, host)[2]), requests[0])


def no_device_here(spec: BackendSpec, host: Host, source: str) -> Reason | None:
    """The reason, of code ``device``, where no variant of ``spec`` is for the host's device; None where one is."""
    devices = spec.all_devices
    if best_match(devices, host.device) is not None:
        return None
    named = without_contained(devices)
    message = f"device {host.device} not supported by {source}; supported: {listed(named)}"
    return Reason("device", message, host.device, named, source, USE_ANOTHER)


def reasons_here(record: PluginRecord, host: Host) -> tuple[Reason, ...]:
    """Why a backend cannot serve a plain request on ``host``; empty where it can.

    It is a single reason of code ``device`` where the host has no device of the backend's: then nothing is amiss. Else
    the reasons say what is missing. For a plugin that is not loaded they are its own.
    """
    spec = record.spec
    if spec is None:
        return record.reasons
    if (reason := no_device_here(spec, host, record.label)) is not None:
        return (reason,)
    _, _, reasons, _ = fitting_variant(spec, record.label, request_here(spec, record.label, host), host)
    return reasons or _no_kernels()


def _no_kernels() -> tuple[Reason, ...]:
    """Why nothing runs where no kernels of the builders can be found; empty elsewhere."""
    lacking = lacking_kernels()
    if not lacking:
        return ()
    message = f"attncore's kernels cannot be found: {lacking}"
    return (Reason("requirement", message, None, None, "attncore", "attncore doctor says how to get them"),)


def reasons_by_variant(record: PluginRecord, host: Host) -> dict[str, tuple[Reason, ...]]:
    """Variant -> why it cannot serve a plain request on ``host``; of a spec without variants under ``""``.

    Empty for a plugin that is not loaded.
    """
    variants = record.spec.by_variant if record.spec is not None else ()
    return {
        name: tuple(
            reasons_against(
                stated, plain_request(stated), host, stated_by(name, stated, record.label, host), record.label
            )
        )
        for name, stated in variants
    }
