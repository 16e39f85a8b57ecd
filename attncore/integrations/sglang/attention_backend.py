"""What SGLang calls in each step: metadata of its ForwardBatch, and the attention of each layer."""

from __future__ import annotations

import logging
from typing import Any

import torch
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend

from attncore.builder.adopted.steps import AdoptedSteps
from attncore.integrations.model_sinks import ModelSinks
from attncore.integrations.sglang.choose_backends import choose, kinds_of
from attncore.integrations.sglang.engine_facts import Layer, layer_of, layers_of, refuse_engine
from attncore.integrations.sglang.step_tensors import StepTensors, host_rows
from attncore.logged import logged
from attncore.show import counted

_logger = logging.getLogger("attncore")

_DUMMY_LENGTH = 1
"""The length of rows that SGLang pads a captured size with: they are decodes of one token, which write to its dummy
slot 0 and read one key. They are right for every backend, whatever its ``pad_seq_len``.
"""


class Group:
    """Layers that share a backend's configuration: the backend, its steps, and the metadata of the step under way."""

    def __init__(self, backend: Any, tensors: StepTensors, window_pool: Any, num_slots: int) -> None:
        self.backend, self.window_pool = backend, window_pool
        self.steps = AdoptedSteps(
            backend,
            max_num_reqs=tensors.max_num_reqs,
            max_num_tokens=max(num_slots, tensors.max_model_len),
            max_model_len=tensors.max_model_len,
            num_blocks=max(num_slots // backend.config.block_size, 1),
        )
        self.metadata: Any = None


class AttncoreAttentionBackend(AttentionBackend):  # type: ignore[misc]  # checked without SGLang
    """attncore's backends behind SGLang's model runner, made when it has its model and its pools.

    ``name``: the backend for all layers; None: attncore chooses. Raises NoBackendError with attncore's reasons, and
    ValueError with the reason, for what cannot run: no forward pass has begun then.
    """

    extend_dummy_seqs_capped_by_req_pool = True

    def __init__(self, runner: Any, name: str | None) -> None:
        super().__init__()
        refuse_engine(runner)
        self._runner, self._name, self._pool = runner, name, runner.token_to_kv_pool
        self._tensors = StepTensors(runner.req_to_token_pool.req_to_token, runner.page_size)
        self._groups: list[Group] = []
        self._layers: dict[Any, tuple[Any, Group, Any]] = {}
        self._step: Any = None
        self._sinks = ModelSinks()
        if layers := layers_of(runner.model, self._pool):
            self._add(layers)
        specs = [group.backend.spec for group in self._groups]
        self.needs_cpu_seq_lens = any(spec is None or spec.host_lengths != "none" for spec in specs) or not specs

    def _add(self, layers: dict[Any, Layer]) -> None:
        """Chooses backends for ``layers``, and makes them."""
        choice = choose(self._runner, layers.values(), self._name)
        device = torch.device(self._runner.device)
        where = f"cuda:{torch.cuda.current_device()}" if device.type == "cuda" else str(device)
        kinds = kinds_of(layers.values())
        made: dict[str, Group] = {}
        for first, backend in choice.create(where).items():
            windowed = next(layer.in_window_pool for layer in layers.values() if kinds[layer.kind] == first)
            made[first] = Group(backend, self._tensors, self._pool if windowed else None, self._num_slots(windowed))
        for module, layer in layers.items():
            kind = kinds[layer.kind]
            group = made[choice.group_of[kind]]
            impl = self._impl(layer, group)
            self._layers[module] = (impl, group, self._cache(module))
            if layer.sinks is not None:  # a parameter, to which SGLang writes the weights of an update in place
                self._sinks.follow(layer.name, impl, {"sinks": layer.sinks}, "sinks")
        self._groups.extend(made.values())
        for kind, one in choice.items():
            logged(_logger, logging.INFO, "SGLang's layers like %s run on %s", kind, one.name)

    def _num_slots(self, windowed: bool) -> int:
        pool = self._pool
        return int(pool.size_swa if windowed else pool.size) + int(self._runner.page_size)

    def _impl(self, layer: Layer, group: Group) -> Any:
        return group.backend.impl(
            layer.name,
            scale=layer.scale,
            sliding_window=layer.sliding_window,
            logits_soft_cap=layer.logits_soft_cap,
            sinks=layer.sinks,
            k_scale=layer.k_scale,
            v_scale=layer.v_scale,
        )

    def _cache(self, module: Any) -> tuple[Any, Any]:
        """Keys and values of a layer as pages: views of SGLang's buffers of slots."""
        page = self._runner.page_size
        buffers = self._pool.get_key_buffer(module.layer_id), self._pool.get_value_buffer(module.layer_id)
        keys, values = (one[: len(one) // page * page].view(-1, page, *one.shape[1:]) for one in buffers)
        return keys, values

    def init_forward_metadata(self, forward_batch: Any) -> None:
        """The metadata of an eager step."""
        self._build(forward_batch, graph=False)

    def init_forward_metadata_out_graph(self, forward_batch: Any, in_capture: bool = False) -> None:
        """The metadata of a step of a captured size: to capture over, or to replay."""
        self._build(forward_batch, graph=True, in_capture=in_capture)

    def init_forward_metadata_in_graph(self, forward_batch: Any) -> None:
        """Inside a capture: plans that can be made in the graph are recorded there. Nothing in an eager step."""
        if self._runner.device == "cuda" and torch.cuda.is_current_stream_capturing():
            for group in self._groups:
                group.metadata.record()

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        """ValueError where graphs are to hold more requests than SGLang has rows for."""
        if max_bs > self._tensors.max_num_reqs:
            raise ValueError(
                f"cuda_graph_max_bs: {counted(max_bs, 'request')} found, and SGLang keeps "
                f"{self._tensors.max_num_reqs}; lower it"
            )

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        """The length of padded rows."""
        return _DUMMY_LENGTH

    get_cpu_graph_seq_len_fill_value = get_cuda_graph_seq_len_fill_value

    def _build(self, batch: Any, *, graph: bool, in_capture: bool = False) -> None:
        self._step = None
        if not batch.batch_size or batch.forward_mode.is_idle():
            return
        host = host_rows(batch)
        columns = self._tensors.fill(batch, host)
        if graph:
            columns = self._tensors.columns
        self._step = batch, host, columns, graph, in_capture
        if self._sinks:
            self._sinks.update()
        for group in self._groups:
            self._build_group(group)

    def _build_group(self, group: Group) -> None:
        batch, host, columns, graph, in_capture = self._step
        starts, lengths, table = self._tensors.rows(batch, columns, group.window_pool)
        group.metadata = group.steps.build(
            query_start_loc=starts,
            seq_lens=lengths,
            block_table=table,
            slot_mapping=self._tensors.slots(batch, group.window_pool, graph=graph),
            host_query_start_loc=host.starts,
            host_seq_lens=host.lengths,
            capturing=in_capture,
        )

    def forward_decode(
        self, q: Any, k: Any, v: Any, layer: Any, forward_batch: Any, save_kv_cache: bool = True, **more: Any
    ) -> Any:
        """The attention of one layer: (T, heads * size of a value head).

        ``save_kv_cache`` False, and a layer without keys of its own: what is in the cache already is attended over.
        """
        known = self._layers.get(layer)
        if known is None:
            known = self._add_late(layer, more)
        impl, group, cache = known
        if more and any(value is not None for name, value in more.items() if name != "sinks"):
            raise self._refused(layer, more)
        if self._pool.layer_transfer_counter is not None:  # caches of the host are brought back, layer by layer
            self._pool.get_key_buffer(layer.layer_id)
        query = q.view(-1, layer.tp_q_head_num, layer.qk_head_dim)
        write = save_kv_cache and k is not None
        key = k.view(-1, layer.tp_k_head_num, layer.qk_head_dim) if k is not None else None
        value = v.view(-1, layer.tp_v_head_num, layer.v_head_dim) if v is not None else None
        output = impl.forward(query, key, value, cache, group.metadata, write=write)
        return output.reshape(query.shape[0], -1)

    forward_extend = forward_decode

    def _add_late(self, module: Any, more: dict[str, Any]) -> tuple[Any, Group, Any]:
        """A layer that is no module of the runner's model: its backend is chosen in its first step, which is made for
        it, too.
        """
        layer = layer_of(f"layers.{module.layer_id}", module, self._pool, more.get("sinks"))
        before = len(self._groups)
        self._add({module: layer})
        for group in self._groups[before:]:
            self._build_group(group)
        return self._layers[module]

    @staticmethod
    def _refused(layer: Any, more: dict[str, Any]) -> RuntimeError:
        asked = ", ".join(sorted(name for name, value in more.items() if value is not None and name != "sinks"))
        return RuntimeError(
            f"layer {layer.layer_id}: its model passes {asked} to its attention, which attncore does not take inside "
            "SGLang; choose another --attention-backend"
        )
