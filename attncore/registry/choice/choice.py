"""Choice: what negotiation gives an engine, and the one place where a backend is made."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from attncore.errors import PluginError
from attncore.registry.choice import explain
from attncore.registry.choice.candidates import Candidate
from attncore.registry.choice.constraints import option_problem
from attncore.registry.choice.negotiate import Outcome
from attncore.registry.choice.request import AttentionRequest
from attncore.registry.host.host import Host
from attncore.registry.plugins.load import described
from attncore.registry.reasons import Reason
from attncore.registry.spec.backend_spec import BackendSpec

if TYPE_CHECKING:
    from attncore.abstract import AttentionBackend, BackendConfig


@dataclass(frozen=True)
class Choice:
    """A backend chosen for a request on a host. Nothing of it is imported before ``create``."""

    name: str
    spec: BackendSpec = field(repr=False)
    """As the variant chosen states it."""
    variant: str
    block_size: int
    """Tokens per block of the kernel: what ``InputBatch`` is given."""
    kv_cache_layout: str
    request: AttentionRequest
    host: Host = field(repr=False)
    candidate: Candidate = field(repr=False)
    outcome: Outcome = field(repr=False)
    asked_by: str = field(default="the request", repr=False)

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
        """Candidate that cannot be used -> all its reasons."""
        found: dict[str, tuple[Reason, ...]] = {}
        for one in self.outcome.rest:
            found[one.name] = (*found.get(one.name, ()), *one.reasons)
        return found

    def explain(self) -> str:
        """A line a candidate: what was chosen and why, what was not and every reason."""
        return explain.text(self.outcome, self.request, self.asked_by)

    def as_json(self) -> dict[str, Any]:
        """The choice as JSON types."""
        return {
            "name": self.name,
            "variant": self.variant,
            "block_size": self.block_size,
            "manager_block_size": self.request.manager_block_size or self.block_size,
            "kv_cache_layout": self.kv_cache_layout,
            "kv_cache_dtype": self.kv_cache_dtype,
        }

    def create(self, device: str | None = None, options: Mapping[str, Any] | None = None) -> AttentionBackend:
        """Import the backend's library and make the backend.

        ``device`` is as torch writes it; None: the host's first one, but the CPU for a backend that was chosen as one
        for any device. ``options`` overrides the request's options for this backend. Raises ValueError beginning with
        ``options`` for one that the spec does not declare, TypeError where the factory makes no AttentionBackend, and
        PluginError, with the cause chained, where the library cannot be imported or asks the process to end.
        """
        from attncore.abstract import BackendConfig

        given = {**self.request.options.get(self.name, {}), **(options or {})}
        for name, value in given.items():
            if problem := option_problem(self.spec, name, value):
                raise ValueError(f"options: {problem}")
        defaults = {name: option.default for name, option in self.spec.options.items()}
        anywhere = self.candidate.match is not None and self.candidate.match.pattern == "any"
        request = self.request
        config = BackendConfig(
            num_heads=request.num_heads,
            num_kv_heads=request.num_kv_heads,
            head_size=request.head_size,
            dtype=request.dtype,
            block_size=self.block_size,
            kv_cache_dtype=request.kv_cache_dtype,
            kv_cache_layout=self.kv_cache_layout,
            device=device or ("cpu" if anywhere else self.host.torch_device),
            head_size_v=request.head_size_v,
            max_model_len=request.max_model_len,
            sliding_window=request.sliding_window,
            logits_soft_cap=request.logits_soft_cap,
            use_mla=request.use_mla,
            variant=self.variant,
            options={**defaults, **given},
            spec=self.spec,
        )
        return self.create_for(config)

    def create_for(self, config: BackendConfig) -> AttentionBackend:
        """The backend for a configuration of the caller's own, which is not checked; raises as ``create`` does."""
        from attncore.abstract import AttentionBackend

        module, _, path = self.spec.factory.partition(":")
        try:
            factory: Any = importlib.import_module(module)
            for part in path.split("."):
                factory = getattr(factory, part)
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            message = f"{self.candidate.label}: importing {self.spec.factory} failed: {described(error)}"
            raise PluginError(message) from error
        try:
            backend = factory(config)
        except (Exception, KeyboardInterrupt):
            raise
        except BaseException as error:  # SystemExit: a library does not end the process that asked for it
            raise PluginError(f"{self.candidate.label}: {self.spec.factory} failed: {described(error)}") from error
        if not isinstance(backend, AttentionBackend):
            raise TypeError(f"factory: {self.spec.factory} made a {type(backend).__name__}, not an AttentionBackend")
        return backend
