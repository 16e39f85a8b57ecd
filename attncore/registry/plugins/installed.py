"""``attncore.backends``: what is installed and in which state, as an object that prints as a table."""

from __future__ import annotations

from collections.abc import Iterator

from attncore.quoted import one_line
from attncore.registry.host.host import Host
from attncore.registry.plugins.known_backends import KNOWN, not_installed
from attncore.registry.plugins.load import registry
from attncore.registry.plugins.plugin_record import PluginRecord
from attncore.show import cut, guarded, guarded_html, html_table, table

HEADERS = ("BACKEND", "STATE", "FROM", "DEVICES, OR WHY NOT")


class InstalledBackends(tuple[PluginRecord, ...]):
    """The plugins found here, and the backends that attncore knows of and that are ``not_installed``."""

    __slots__ = ()

    @guarded
    def __repr__(self) -> str:
        return table(HEADERS, self._rows())

    @guarded_html
    def _repr_html_(self) -> str:
        return html_table(HEADERS, self._rows())

    def _rows(self) -> Iterator[tuple[str, ...]]:
        for record in self:
            words = [", ".join(record.spec.devices)] if record.spec else []
            words += [str(reason) for reason in record.reasons if reason.message != "not installed"]
            words += [reason.fix for reason in record.reasons if reason.message == "not installed"]
            label = cut(one_line(record.label), 28)
            yield cut(one_line(record.name), 20), record.state.replace("_", " "), label, one_line(" | ".join(words))


def backends() -> InstalledBackends:
    """The attention backends of this environment: name, state, distribution, devices, and the reasons against it.

    A sequence of records that prints as a table. Loads each plugin's light module, as ``select`` does, and no kernel
    library; `attncore doctor` tries the libraries too. Errors as of ``select``.
    """
    records = registry().records
    names = {record.name for record in records}
    host = Host.probe()
    missing = (
        PluginRecord(name, known.distribution, "", "not_installed", (not_installed(name, host),))
        for name, known in KNOWN.items()
        if name not in names
    )
    return InstalledBackends((*records, *missing))
