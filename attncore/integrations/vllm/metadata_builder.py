"""vLLM's ``AttentionMetadataBuilder``: makes attncore's steps of vLLM's tensors, for the layers of one group."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from vllm.v1.attention.backend import AttentionCGSupport, AttentionMetadataBuilder

from attncore.abstract import AttentionBackend
from attncore.builder.adopted.step import AdoptedStep
from attncore.builder.adopted.steps import AdoptedSteps
from attncore.integrations.model_sinks import ModelSinks
from attncore.integrations.vllm import model_request as asked
from attncore.integrations.vllm import refusals
from attncore.integrations.vllm.layer import AttncoreImpl
from attncore.integrations.vllm.limits import limits_of
from attncore.quoted import one_line
from attncore.registry.choice.choice import Choice
from attncore.registry.choice.select import select

GRAPH_LEVELS = {
    "never": AttentionCGSupport.NEVER,
    "uniform_decode": AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE,
    "uniform": AttentionCGSupport.UNIFORM_BATCH,
    "always": AttentionCGSupport.UNIFORM_BATCH,
}
"""attncore's level of graph capture -> vLLM's. Graphs of adopted steps hold rows of one length, so that a backend for
any step is captured for these; vLLM runs the others piecewise.
"""


class AttncoreMetadataBuilder(AttentionMetadataBuilder):
    """The steps of a group of layers that share a cache's shape. It has a backend of its own."""

    attncore_name: ClassVar[str | None] = None

    def __init__(self, kv_cache_spec: Any, layer_names: Sequence[str], vllm_config: Any, device: torch.device) -> None:
        super().__init__(kv_cache_spec, list(layer_names), vllm_config, device)
        refuse_engine(vllm_config)
        layers = layers_of(vllm_config, layer_names)
        choice = choice_for(self.attncore_name, vllm_config, kv_cache_spec.block_size, layers)
        check_lengths(choice, vllm_config)
        self._init_reorder_batch_threshold(1, supports_spec_as_decode="multi_token_decode" in choice.spec.features)
        self.backend: AttentionBackend = choice.create(_name_of(device))
        limits = limits_of(vllm_config, kv_cache_spec)
        threshold = int(self.reorder_batch_threshold or 1)
        # A group's blocks are as many as vLLM's times its own ratio, which no builder is told.
        self.steps = AdoptedSteps(self.backend, **limits._asdict(), num_blocks=None, decode_threshold=threshold)
        self._most = 0 if vllm_config.speculative_config is None else limits.max_model_len
        self._bounded = lengths_are_bounds(vllm_config)
        self._recorded: Any = None
        self._sinks = ModelSinks()
        for name, layer in layers.items():
            inner = layer.bind(name, self.backend, self.record)
            if layer.sinks is not None:
                self._sinks.follow(name, inner, vars(layer), "sinks")

    @classmethod
    def get_cudagraph_support(cls, vllm_config: Any, kv_cache_spec: Any) -> AttentionCGSupport:
        """The level of the backend that the group's layers will have."""
        layers = layers_of(vllm_config, list(vllm_config.compilation_config.static_forward_context))
        size = getattr(kv_cache_spec, "head_size", None)
        same = {name: one for name, one in layers.items() if one.head_size == size}
        # vLLM asks before it has cut its blocks into the kernel's.
        choice = choice_for(cls.attncore_name, vllm_config, kv_cache_spec.block_size, same or layers, of_kernel=False)
        return GRAPH_LEVELS[choice.spec.cuda_graph]

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> AdoptedStep:
        """The step of vLLM's tensors, planned. Nothing waits for the device, and of a model with sinks alone these are
        copied, as they are now.
        """
        return self._build(common_attn_metadata, capturing=False)

    def build_for_cudagraph_capture(self, common_attn_metadata: Any) -> AdoptedStep:
        """The step that vLLM captures a graph over."""
        if (rows := common_attn_metadata.num_reqs) in self.steps.captured:  # vLLM captures it anew
            self.steps.release(rows)
        return self._build(common_attn_metadata, capturing=True)

    def _build(self, given: Any, *, capturing: bool) -> AdoptedStep:
        if given.causal is not True:
            raise ValueError(f"attncore: {refusals.REFUSED['use_non_causal']}")
        if self._sinks:
            self._sinks.update()
        lengths = given.seq_lens_cpu_upper_bound
        if self._most and lengths is not None:  # with drafts that may not be accepted they pass the model's length
            lengths = lengths.clamp(max=self._most)
        return self.steps.build(
            query_start_loc=given.query_start_loc,
            seq_lens=given.seq_lens,
            block_table=given.block_table_tensor,
            slot_mapping=given.slot_mapping,
            host_query_start_loc=given.query_start_loc_cpu,
            host_seq_lens=lengths,
            bounded=self._bounded and lengths is not None,
            capturing=capturing,
        )

    def record(self, step: AdoptedStep) -> None:
        """Before a layer of a step of a captured size: inside a capture, what makes and plans each step becomes part of
        the graph; without a graph it is done at once.
        """
        if not (torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()):
            step.settle()
        elif step is not self._recorded:
            step.record()
            self._recorded = step


def refuse_engine(vllm_config: Any) -> None:
    """ValueError with every reason against vLLM's configuration."""
    if reasons := list(refusals.refused_engine(vllm_config)):
        raise ValueError("attncore: " + "; ".join(reasons))


def layers_of(vllm_config: Any, names: Sequence[str]) -> dict[str, AttncoreImpl]:
    """The layers of these names that are attncore's, with the scales that were loaded with the weights."""
    context, found = vllm_config.compilation_config.static_forward_context, {}
    for name in names:
        impl = getattr(context[name], "impl", None)
        if isinstance(impl, AttncoreImpl):
            if impl.kv_cache_dtype.startswith("fp8"):
                impl.scales = float(context[name]._k_scale_float), float(context[name]._v_scale_float)
            found[name] = impl
    return found


def choice_for(
    backend: str | None, vllm_config: Any, block_size: int, layers: dict[str, AttncoreImpl], *, of_kernel: bool = True
) -> Choice:
    """The choice for the layers of a group; ValueError with attncore's reasons where there is none."""
    request = asked.request_for_layers(backend, vllm_config, block_size, layers.values(), of_kernel=of_kernel)
    if reasons := asked.sentences(asked.negotiated(request)):
        raise ValueError("; ".join(reasons))
    return select(request)


def lengths_are_bounds(vllm_config: Any) -> bool:
    """Whether vLLM's lengths on the host may be too large in some step: where it prepares a step before it knows which
    drafts were accepted, and in the steps of a model that drafts.
    """
    drafts = vllm_config.speculative_config
    return drafts is not None and (
        bool(vllm_config.scheduler_config.async_scheduling) or str(drafts.method) not in ("ngram", "suffix")
    )


def check_lengths(choice: Choice, vllm_config: Any) -> None:
    """ValueError where vLLM has bounds of the lengths on the host, and the backend needs the lengths themselves."""
    if choice.spec.host_lengths == "exact" and lengths_are_bounds(vllm_config):
        raise ValueError(
            f"attncore: {choice.name} plans by exact lengths on the host (host_lengths 'exact' in its spec), and vLLM "
            "has upper bounds where a model drafts or steps are scheduled ahead of drafts; run without drafts, or with "
            "drafts of method ngram and without asynchronous scheduling, or name a backend that takes bounds: "
            f"{one_line(', '.join(_bounded_names()) or 'none is installed')}"
        )


def _name_of(device: torch.device) -> str | None:
    """The device as attncore writes it; None: the first one of the host. vLLM's tests number the CPU."""
    return "cpu" if device.type == "cpu" else None if device.index is None else str(device)


def _bounded_names() -> list[str]:
    from attncore.registry.plugins.load import registry

    return [one.name for one in registry().records if one.spec is not None and one.spec.host_lengths != "exact"]
