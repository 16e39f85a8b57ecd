"""``attncore.backends``: what is installed, in which state, and what of it runs here, as an object that prints as a
table. `attncore list` prints the same columns.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from attncore.quoted import one_line
from attncore.registry.choice.runs_here import reasons_here
from attncore.registry.device_patterns import without_contained
from attncore.registry.host.host import Host
from attncore.registry.plugins.known_backends import KNOWN, not_installed
from attncore.registry.plugins.load import registry
from attncore.registry.plugins.plugin_record import PluginRecord
from attncore.registry.reasons import Reason
from attncore.show import WIDTH, cut, guarded, guarded_html, html_table
from attncore.terminal import table_lines

HEADERS = ("NAME", "DISTRIBUTION", "VERSION", "STATE", "RUNS", "DEVICES", "REASON")


class InstalledBackends(tuple[PluginRecord, ...]):
    """The plugins found here, and the backends that attncore knows of and that are ``not_installed``."""

    _missing: tuple[tuple[Reason, ...], ...]

    def __new__(cls, records: Iterable[PluginRecord], host: Host) -> InstalledBackends:
        """Judged on ``host`` at once: to print runs no plugin's code."""
        made = super().__new__(cls, records)
        made._missing = tuple(reasons_here(record, host) for record in made)
        return made

    @property
    def runs_here(self) -> tuple[str, ...]:
        """The names of those that can run on this machine, whatever the model."""
        return tuple(record.name for record, missing in zip(self, self._missing, strict=True) if not missing)

    @guarded
    def __repr__(self) -> str:
        return "\n".join(table_lines(HEADERS, list(self._rows()), WIDTH))

    @guarded_html
    def _repr_html_(self) -> str:
        return html_table(HEADERS, self._rows())

    def _rows(self) -> Iterator[tuple[str, ...]]:
        for record, missing in zip(self, self._missing, strict=True):
            yield tuple(cut(one_line(cell), 400) for cell in row(record, missing))


def row(record: PluginRecord, missing: tuple[Reason, ...]) -> tuple[str, ...]:
    """A plugin under HEADERS; ``missing`` is why it cannot run here."""
    devices = ", ".join(without_contained(record.spec.all_devices)) if record.spec else ""
    # Its devices stand in the column before.
    here = (f"no such device here ({one.asked})" if one.code == "device" else str(one) for one in missing)
    words = " | ".join(dict.fromkeys((*map(str, record.reasons), *here)))
    state = record.state.replace("_", " ")
    return (record.name, record.distribution, record.version, state, "no" if missing else "yes", devices or "-", words)


def backends() -> InstalledBackends:
    """The attention backends of this environment: name, state, distribution, whether it runs here, and why not.

    A sequence of records that prints as a table, as `attncore list` does. Loads each plugin's light module, as
    ``select`` does, and no kernel library; `attncore doctor` tries the libraries too. Errors as of ``select``.
    """
    plugins = registry()
    names = {record.name for record in plugins.records}
    host = Host.probe().with_packages(plugins.packages)
    missing = (
        PluginRecord(name, known.distribution, "", "not_installed", (not_installed(name, host),))
        for name, known in KNOWN.items()
        if name not in names
    )
    return InstalledBackends((*plugins.records, *missing), host)
