"""Choice: a backend chosen for a request on a host, with its block size and layout; it creates the backend."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from attncore.quoted import one_line, quoted
from attncore.registry.choice.cache_format import choose_block_size, common_block_sizes, common_layouts
from attncore.registry.choice.candidates import Candidate
from attncore.registry.choice.explain import explain
from attncore.registry.choice.negotiate import Negotiation
from attncore.registry.choice.reasons_against import option_problem
from attncore.registry.choice.show import choice_html, choice_text
from attncore.registry.host.host import Host
from attncore.registry.reasons import Reason
from attncore.registry.request import AttentionRequest
from attncore.registry.spec.backend_spec import BackendSpec
from attncore.show import guarded, guarded_html

if TYPE_CHECKING:
    from attncore.abstract import AttentionBackend, BackendConfig


@dataclass(frozen=True)
class Choice:
    """A backend chosen for a request on a host. Nothing of it is imported before ``create``."""

    name: str
    spec: BackendSpec = field(repr=False)
    """As the variant chosen states it."""
    variant: str
    """Name of the variant; empty where the spec has none."""
    block_size: int
    """Tokens per block of the kernel: what ``InputBatch`` is given."""
    kv_cache_layout: str
    candidate: Candidate = field(repr=False)
    negotiation: Negotiation = field(repr=False)

    __repr__ = guarded(choice_text)
    _repr_html_ = guarded_html(choice_html)

    @property
    def fell_back_from(self) -> str | None:
        """The backend that was named and cannot be used, in whose place this is (policy ``fallback``); else None."""
        return self.negotiation.fell_back_from

    @property
    def request(self) -> AttentionRequest:
        """What was asked."""
        return self.negotiation.request

    @property
    def host(self) -> Host:
        """The machine that the backend was chosen for."""
        return self.negotiation.host

    @property
    def kv_cache_dtype(self) -> str:
        """The dtype of the cache; ``auto`` is the model's."""
        return self.request.kv_cache_dtype

    @property
    def blocks_per_manager_block(self) -> int:
        """Kernel blocks in one block of the engine's allocator; 1 where ``manager_block_size`` was left out."""
        return (self.request.manager_block_size or self.block_size) // self.block_size

    @property
    def reasons(self) -> Mapping[str, tuple[Reason, ...]]:
        """Name of each candidate that cannot be used -> all its reasons."""
        reasons: dict[str, tuple[Reason, ...]] = {}
        for candidate in self.negotiation.rejected:
            reasons[candidate.name] = (*reasons.get(candidate.name, ()), *candidate.reasons)
        return reasons

    def explain(self) -> str:
        """A line per candidate: what was chosen and why, and every reason against the others."""
        return explain(self.negotiation)

    def as_json(self) -> dict[str, Any]:
        """The choice as JSON types."""
        return {
            "name": self.name,
            "variant": self.variant,
            "variant_label": self.candidate.variant_label,
            "block_size": self.block_size,
            "manager_block_size": self.request.manager_block_size or self.block_size,
            "kv_cache_layout": self.kv_cache_layout,
            "kv_cache_dtype": self.kv_cache_dtype,
            "host_needs": sorted(self.spec.host_needs),
            "device_needs": sorted(self.spec.device_needs),
        }

    def create(self, device: str | None = None, options: Mapping[str, Any] | None = None) -> AttentionBackend:
        """Import the backend's library and create the backend.

        ``device`` is as torch writes it; None: the host's first one. ``options`` overrides the request's options for
        this backend. Raises ValueError beginning with ``device`` for one that torch cannot use here (for None, where
        the backend is one for any device: it never runs on the CPU of a host with a GPU unless ``cpu`` is given), with
        ``options`` for one that the spec does not declare, TypeError where they are no mapping or the factory makes no
        AttentionBackend, and PluginError, with the cause chained, where the library cannot be imported or asks the
        process to end.
        """
        from attncore.registry.choice.device_here import device_problem, host_device_problem

        config = self.config(device, options)
        if device is not None:
            problem = device_problem(str(device))
        else:  # a library of a GPU says itself what it lacks
            for_any = self.candidate.match is not None and self.candidate.match.pattern == "any"
            problem = host_device_problem(self.host) if for_any else None
        if problem:
            raise ValueError(f"device: {problem}")
        return self.create_for(config)

    def config(self, device: str | None = None, options: Mapping[str, Any] | None = None) -> BackendConfig:
        """What ``create`` makes the backend for; arguments and errors of options as there. Imports no library."""
        from attncore.abstract import BackendConfig

        request = self.request
        try:
            given = {**request.options.get(self.name, {}), **dict({} if options is None else options)}
        except Exception as error:  # a mapping of the caller's own
            raise TypeError(f"options: {quoted(options)} cannot be read as a mapping: {one_line(error)}") from error
        for name, value in given.items():
            if problem := option_problem(self.spec, name, value):
                raise ValueError(f"options: {problem}")
        defaults = {name: option.default for name, option in self.spec.options.items()}
        return BackendConfig(
            num_heads=request.num_heads,
            num_kv_heads=request.num_kv_heads,
            head_size=request.head_size,
            dtype=request.dtype,
            block_size=self.block_size,
            kv_cache_dtype=request.kv_cache_dtype,
            kv_cache_layout=self.kv_cache_layout,
            device=device if device is not None else self.host.torch_device,
            head_size_v=request.head_size_v,
            max_model_len=request.max_model_len,
            sliding_window=request.sliding_window,
            logits_soft_cap=request.logits_soft_cap,
            use_mla=request.use_mla,
            variant=self.variant,
            options={**defaults, **given},
            spec=self.spec,
        )

    def create_for(self, config: BackendConfig) -> AttentionBackend:
        """The backend for a configuration of the caller's own, which is not checked. Raises as ``create`` does, and
        TypeError beginning with ``config`` for what is none.
        """
        from attncore.abstract.config_against_spec import check_config
        from attncore.registry.choice.create_backend import create_backend

        check_config(config)
        return create_backend(self.spec, config, self.candidate.label)


def choose(negotiation: Negotiation) -> Choice | None:
    """The candidate that a negotiation chose, its block size and layout settled; None where it chose none."""
    candidate = negotiation.chosen
    if candidate is None or candidate.spec is None:
        return None
    spec, request = candidate.spec, negotiation.request
    block_size = choose_block_size(common_block_sizes(spec, request), request, (spec.preferred_block_size,))
    return choice_of(negotiation, block_size, common_layouts(spec, request)[0])


def choice_of(negotiation: Negotiation, block_size: int, layout: str) -> Choice:
    """The chosen candidate with this block size and layout. ValueError where the negotiation chose none."""
    candidate = negotiation.chosen
    if candidate is None or candidate.spec is None:
        raise ValueError(f"negotiation: {negotiation.refusal}")
    return Choice(candidate.name, candidate.spec, candidate.variant, block_size, layout, candidate, negotiation)
