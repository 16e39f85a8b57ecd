"""PluginRecord: one plugin, where it comes from, its state, and the reasons for it."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.metadata import EntryPoint

from attncore.quoted import one_line
from attncore.registry.reasons import Reason
from attncore.registry.spec.backend_spec import BackendSpec
from attncore.show import angled, guarded


@dataclass(frozen=True, slots=True, repr=False)
class PluginRecord:
    """One entry point of the group ``attncore.backends``.

    ``state`` is of STATES; ``reasons`` say why it is not ``loaded`` (warnings where it is); ``spec`` is None unless it
    is loaded. ``error`` is the exception behind a broken or incompatible record.
    """

    name: str
    distribution: str
    version: str
    state: str
    reasons: tuple[Reason, ...] = ()
    spec: BackendSpec | None = None
    entry_point: EntryPoint | None = None
    error: BaseException | None = None

    @guarded
    def __repr__(self) -> str:  # ``error`` is a plugin's own object, whose repr may be anything
        facts = (self.state, *map(one_line, self.reasons))
        return angled(f"PluginRecord {one_line(self.name)} ({one_line(self.label)})", facts)

    @property
    def label(self) -> str:
        """``attn-flash 0.1.0``."""
        return " ".join(part for part in (self.distribution, self.version) if part)
