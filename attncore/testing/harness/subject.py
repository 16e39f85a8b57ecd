"""The backend under test: its record, its spec, and backends made of it by the same negotiation that an engine uses."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import cached_property
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

from attncore.did_you_mean import did_you_mean
from attncore.quoted import listed, quoted
from attncore.registry.choice.choice import choose
from attncore.registry.choice.negotiate_installed import negotiate_installed
from attncore.registry.choice.reasons_against import option_problem, reasons_against
from attncore.registry.choice.runs_here import no_device_here
from attncore.registry.host.host import Host
from attncore.registry.plugins.load import registry
from attncore.registry.plugins.plugin_record import PluginRecord
from attncore.registry.reasons import FailedCheck, Reason
from attncore.registry.request import AttentionRequest
from attncore.registry.spec import sizes
from attncore.registry.spec.backend_spec import BackendSpec
from attncore.registry.spec.sizes import MultipleOf
from attncore.testing.engines.left_alone import check_config
from attncore.testing.harness.checked_layers import asks_check_of_layers
from attncore.testing.harness.declared_needs import only_declared_fields
from attncore.testing.harness.errors import ConformanceError, NotRunError, UnsupportedError

if TYPE_CHECKING:
    from attncore.abstract import AttentionBackend, BackendConfig
    from attncore.registry.choice.choice import Choice


OTHER_BLOCK_SIZES = (16, 32, 64, 128, 256)
"""Sizes of blocks that are tried where a backend's own check refuses the small ones, as for the kernel of an option."""


class _RefusedError(UnsupportedError):
    """A negotiation refuses the backend, for each of ``reasons``."""

    def __init__(self, reasons: list[str]) -> None:
        super().__init__("; ".join(reasons))
        self.reasons = reasons


class _Usable(NamedTuple):
    """Which form of a spec runs here."""

    form: BackendSpec | None
    refusals: tuple[str, ...] = ()
    """Why none does."""
    asked: Mapping[str, Any] = MappingProxyType({})
    """What of the base request is another for it."""
    check_fails: bool = False
    """Whether none does because the spec's own check fails."""


class Subject:
    """One backend by name, on this machine.

    ``form`` is the spec of the first variant that runs here, and the facts that tests go by; ``refusals`` say why none
    does. ``backend`` makes (and keeps) backends. They read the declared fields of a step alone, but without
    ``checks_needs``: what times a backend hands it the step as it is. With ``use_mla`` every request is for a latent
    cache, and the form is the first that runs those.
    """

    def __init__(
        self,
        name: str,
        *,
        device: str | None = None,
        options: Mapping[str, Any] | None = None,
        host: Host | None = None,
        checks_needs: bool = True,
        use_mla: bool = False,
    ) -> None:
        self.name = name
        self.device = device
        self.use_mla = use_mla
        if not isinstance(options, Mapping | None):
            raise TypeError(f"OPTIONS: {quoted(options)} is not a mapping of options to values")
        self.options = dict(options or {})
        self.host = host
        self._checks_needs = checks_needs
        self._watched = only_declared_fields if checks_needs else _as_it_is
        self._made: dict[tuple[Any, ...], AttentionBackend] = {}

    def with_options(self, options: Mapping[str, Any]) -> Subject:
        """The same backend, created with ``options``."""
        return Subject(self.name, device=self.device, options=options, host=self.host, use_mla=self.use_mla)

    @property
    def latent(self) -> Subject:
        """The same backend, asked for latent caches alone; UnsupportedError where it runs none here."""
        if self.use_mla or self.form.mla_only:
            return self
        if not any(form.use_mla for _, form in self.spec.by_variant):
            raise UnsupportedError("its spec does not declare use_mla")
        _ = self._latent.form  # or why it runs none
        return self._latent

    @cached_property
    def _latent(self) -> Subject:
        return Subject(
            self.name,
            device=self.device,
            options=self.options,
            host=self.host,
            checks_needs=self._checks_needs,
            use_mla=True,
        )

    @cached_property
    def record(self) -> PluginRecord:
        """What became of the plugin; UnsupportedError naming ``BACKEND`` where no distribution provides it."""
        records = registry().records
        found = [record for record in records if record.name == self.name]
        if not found:
            names = sorted({record.name for record in records})
            raise NotRunError(
                f"BACKEND: no distribution installed here provides {quoted(self.name)}; installed: {listed(names)}"
                f"{did_you_mean(self.name, names)}"
            )
        return min(found, key=lambda record: record.state != "loaded")

    @property
    def spec(self) -> BackendSpec:
        """The spec; UnsupportedError with the plugin's reasons where it could not be loaded."""
        if self.record.spec is None:
            reasons = "; ".join(map(str, self.record.reasons))
            raise NotRunError(f"BACKEND: {quoted(self.name)} is {self.record.state}: {reasons}")
        return self.record.spec

    @cached_property
    def _usable(self) -> _Usable:
        """The form that runs here, or why none does."""
        if (reason := no_device_here(self.spec, self.host or Host.probe(), self.record.label)) is not None:
            return _Usable(None, (str(reason),))  # and nothing about sizes, which are the kit's own
        self._check_options()
        refusals: list[str] = []
        asked: dict[str, Any] = {"use_mla": True} if self.use_mla else {}
        for form in self._forms:
            reasons: list[str] = []
            sizes = [{"block_size": size} for size in OTHER_BLOCK_SIZES if size in form.block_sizes]
            for other in (asked, *(asked | size for size in sizes)):
                try:
                    return _Usable(self._choose(**_base(form, **other)).spec, asked=other)
                except _RefusedError as error:
                    reasons = reasons or error.reasons  # of the sizes that are tried first
                except ConformanceError as error:
                    return _Usable(None, (str(error),), check_fails=True)
            refusals += reasons
        return _Usable(None, tuple(dict.fromkeys(refusals or ["its spec does not declare use_mla"])))

    @property
    def _forms(self) -> list[BackendSpec]:
        """The forms for the kind of cache that is asked for; those for latent ones alone where there is no other."""
        forms = [form for _, form in self.spec.by_variant]
        if self.use_mla:
            return [form for form in forms if form.use_mla]
        return [form for form in forms if not form.mla_only] or forms

    def _check_options(self) -> None:
        """ValueError for an option that no form takes: a negotiation would call the backend unsupported, and skip."""
        for name, value in self.options.items():
            problems = [option_problem(form, name, value) for _, form in self.spec.by_variant]
            if all(problems):
                raise ValueError(f"OPTIONS: {problems[0]}")

    @property
    def refusals(self) -> tuple[str, ...]:
        """Why no form of the backend runs on this machine; empty where one does."""
        return self._usable.refusals

    @property
    def refusal(self) -> str:
        """``refusals`` in a sentence."""
        return "; ".join(self.refusals)

    @property
    def form(self) -> BackendSpec:
        """The facts that tests go by; UnsupportedError where no form runs here, ConformanceError where that is so
        because the spec's own check fails."""
        form = self._usable.form
        if form is None:
            raise ConformanceError(self.refusal) if self._usable.check_fails else UnsupportedError(self.refusal)
        return form

    def request(self, **changes: Any) -> AttentionRequest:
        """What the kit asks for unless a test changes it."""
        return AttentionRequest(**{**self._base(**changes), "backend": self.name})

    def backend(self, **changes: Any) -> AttentionBackend:
        """A backend for the base request with ``changes``; made once for each. UnsupportedError where it is refused.

        ``use_mla=True`` asks for a latent cache, the base of a backend that has no other.
        """
        key = tuple(sorted(changes.items()))
        if key not in self._made:
            self._made[key] = self.another(**changes)
        return self._made[key]

    def another(self, **changes: Any) -> AttentionBackend:
        """A backend for the base request with ``changes``, made anew in each call."""
        choice = self._choose(**self._base(**changes))
        backend = self._kept(choice.create(self.device, self.options), choice.config(self.device, self.options))
        return asks_check_of_layers(backend, choice, self.record.label)

    def beyond(self, **changes: Any) -> AttentionBackend:
        """A backend for a configuration that the spec does not declare, made past the negotiation that would refuse."""
        config = dataclasses.replace(self.backend().config, **changes)
        return self._kept(self._choose(**self._base()).create_for(config), config)

    def _kept(self, backend: AttentionBackend, config: BackendConfig) -> AttentionBackend:
        """A backend that was created for ``config``, watched; ConformanceError where it keeps another."""
        check_config(backend, config)
        return self._watched(backend)

    def choice(self) -> Choice:
        """What a negotiation of the base request chooses; UnsupportedError where it refuses the backend."""
        return self._choose(**self._base())

    def refused_by_check(self, options: Mapping[str, Any]) -> str | None:
        """Why the spec's ``check`` refuses the base request with ``options``, of the types and choices declared, for
        the variant that is chosen without them; None where it does not, or for what this machine lacks."""
        wanted = self.choice().variant
        negotiation = negotiate_installed(self.request(options={self.name: dict(options)}), host=self.host)
        chosen = choose(negotiation)
        if chosen is not None and chosen.variant == wanted:
            return None
        refused = [one for one in negotiation.rejected if one.name == self.name]
        reasons = [reason for one in refused if one.variant in ("", wanted) for reason in one.reasons]
        if chosen is not None:
            reasons += [reason for name, some in chosen.candidate.passed_over if name == wanted for reason in some]
        return next((str(reason) for reason in reasons if reason.code in ("check", "option")), None)

    def around_a_block(self, size: int) -> list[tuple[int, int]]:
        """Requests of (context, tokens of a step), of the phases that the form runs, at the edges of blocks of
        ``size``; at most 13 blocks in all, and none longer than the spec allows, where some are not.
        """
        batch = []
        if "prefill" in self.form.phases:
            batch += [(0, 2 * size + 1), (size - 1, 3)]
        if "decode" in self.form.phases:
            batch += [(size, 1), (2 * size - 1, 1), (3 * size + 1, 1)]
        return self.no_longer_than_declared(batch)

    def no_longer_than_declared(self, batch: list[tuple[int, int]]) -> list[tuple[int, int]]:
        """The requests that may run one token more in the longest that the spec allows; all, where none may: an engine
        says then what is unsupported.
        """
        longest = self.form.max_model_len or math.inf
        return [(context, tokens) for context, tokens in batch if context + tokens < longest] or batch

    def _base(self, **changes: Any) -> dict[str, Any]:
        return _base(self.form, **{**self._usable.asked, **changes})

    def _choose(self, **fields: Any) -> Choice:
        options = {self.name: self.options} if self.options else {}  # a spec's check may read them
        request = AttentionRequest(**{"backend": self.name, "options": options, **fields})
        negotiation = negotiate_installed(request, host=self.host)
        choice = choose(negotiation)
        if choice is None:
            reasons = [reason for one in negotiation.rejected if one.name == self.name for reason in one.reasons]
            if any(isinstance(reason, FailedCheck) for reason in reasons):  # those of all variants together
                for _, form in self.spec.by_variant:
                    plugin = self.record.label
                    _let_checks_answer(reasons_against(form, request, negotiation.host, plugin, plugin))
            raise _RefusedError([*map(str, reasons)] or [negotiation.refusal])
        for _, passed_over in choice.candidate.passed_over:
            _let_checks_answer(passed_over)
        return choice

    @property
    def drawn_phases(self) -> dict[str, bool]:
        """The arguments of ``drawn.batches`` for batches of the phases that the form runs."""
        phases = self.form.phases
        return {} if len(phases) > 1 else {"contexts": True, "decode": "decode" in phases}

    def require(self, feature: str) -> None:
        """UnsupportedError, with the spec's own reason where it gives one, unless the form declares ``feature``."""
        form = self.form
        if feature in form.features or (feature == "alibi_standard" and "alibi" in form.features):
            return
        raise UnsupportedError(form.unsupported.get(feature, "its spec does not declare it"))

    def require_phase(self, *phases: str) -> None:
        """UnsupportedError unless the form runs every one of ``phases``."""
        missing = [phase for phase in phases if phase not in self.form.phases]
        if missing:
            raise UnsupportedError(f"its spec declares no phase {' and '.join(missing)}")

    def require_graphs(self, *phases: str) -> None:
        """UnsupportedError unless the form declares captured graphs, and runs every one of ``phases``."""
        if self.form.cuda_graph == "never":
            raise UnsupportedError("its spec says cuda_graph='never'")
        self.require_phase(*phases)


def _let_checks_answer(reasons: Sequence[Reason]) -> None:
    """ConformanceError where a variant's check fails, and no fact of its stands against the request: not on a machine
    that lacks its device or a distribution, which the check may count on. ``reasons`` are those against the variant.
    """
    failed = next((reason for reason in reasons if isinstance(reason, FailedCheck)), None)
    if failed is not None and all(reason.code == "check" for reason in reasons):
        raise ConformanceError(failed.message)


def _as_it_is(backend: AttentionBackend) -> AttentionBackend:
    return backend


def _base(form: BackendSpec, **changes: Any) -> dict[str, Any]:
    """A small request that a form accepts: few heads of a common small size, small blocks; with ``changes``. The heads
    are those that the samples of features have values for.
    """
    found: dict[str, Any] = {
        "num_heads": 4,
        "num_kv_heads": 4 if form.max_group_size == 1 else 2,
        "head_size": _first((16, 32, 64, 128), form.head_sizes),
        "dtype": next(name for name in ("float32", "bfloat16", "float16") if name in form.dtypes),
        "block_size": _first((4, 8, 16), form.block_sizes),
        "kv_cache_dtype": "auto" if "auto" in form.kv_cache_dtypes else min(form.kv_cache_dtypes),
    }
    if len(form.phases) == 1:
        found["phase"] = next(iter(form.phases))
    found.update(changes)
    if form.mla_only or found.get("use_mla"):
        _make_latent(form, found, any_size="head_size" not in changes)
    return found


def _make_latent(form: BackendSpec, request: dict[str, Any], *, any_size: bool) -> None:
    """One latent head, values smaller than its rows where the form has such; with ``any_size`` rows that hold some."""
    most = form.max_group_size or request["num_heads"]
    request.update(use_mla=True, num_kv_heads=1, num_heads=min(request["num_heads"], most))
    if "head_size_v" not in request and form.head_size_v is not None:
        rows, of_values = sizes.as_sizes("", form.head_sizes), sizes.as_sizes("", form.head_size_v)
        if any_size and sizes.largest_to(of_values, request["head_size"]) is None:
            least = sizes.smallest(of_values)
            larger = sizes.smallest_from(rows, least + 1) or sizes.smallest_from(rows, least)
            request["head_size"] = larger or request["head_size"]
        values = [value for value in range(request["head_size"] - 1, 0, -1) if value in of_values]
        request["head_size_v"] = next((value for value in values if value % 8 == 0), values[0] if values else None)


def _first(wanted: Iterable[int], accepted: Collection[int] | MultipleOf) -> int:
    return next((size for size in wanted if size in accepted), None) or sizes.smallest(
        sizes.as_sizes("accepted", accepted)
    )
