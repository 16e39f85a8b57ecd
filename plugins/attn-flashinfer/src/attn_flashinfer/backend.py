"""The attention backend flashinfer: configured for one model on one device. Imported when an engine creates it."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import lru_cache
from typing import TYPE_CHECKING, Any
from weakref import ref

import torch

from attn_flashinfer import checks, device_plan, modules, xqa
from attn_flashinfer.captured_trees import CapturedTrees
from attn_flashinfer.device_plan import DevicePlan
from attn_flashinfer.impl import FlashInferImpl
from attn_flashinfer.library import Library, flashinfer
from attn_flashinfer.pages import check_table, pages_of, pool_of
from attn_flashinfer.plans import KeyPlans, StepPlan, Tools
from attn_flashinfer.workspace import Workspace
from attn_flashinfer.wrappers import CapturedDecode, LayerSettings, Shape
from attncore import AttentionBackend, AttentionMetadata, AttentionState, BackendConfig, PlanKey
from attncore.builder import CascadeRule, CommonMetadataBuilder
from attncore.graphs import is_capturing, launch, refuse_while_capturing

if TYPE_CHECKING:
    from attn_flashinfer.profiling import ProfiledStep

_log = logging.getLogger(__name__)

CUDA_CORES, XQA = "cuda_cores", "xqa"


def _no_owner() -> None:
    """Stands for the builder of a step that none has built."""


class FlashInferState(AttentionState):
    """The buffers that captured sizes of the list builder read."""

    def begin_forward(self, metadata: Any) -> None:
        """See the base class. A step is planned when it is built; where another step of its size was built since, whose
        plan a replay would read, it is planned anew, which waits until that plan is on the device. ValueError for a
        step of another builder than this state's: its plan is not that of the graph.
        """
        super().begin_forward(metadata)
        if getattr(metadata, "from_groups", False) and metadata.use_cuda_graph:
            source = metadata.source
            if source is not None and source.builder is not self.builder and self.backend.decode_kernel != XQA:
                raise ValueError(
                    "metadata: of another builder than this state's, so that its plan is not that of the graph; build "
                    "it with the builder of this state"
                )
            self.backend.plan_again(metadata)


class FlashInferBackend(AttentionBackend):
    """FlashInfer's paged kernels. Layers of one plan key share a plan; all share one workspace.

    Raises ValueError naming the field of the configuration that FlashInfer cannot run; see the base class too. A cache
    is one tensor ``[blocks, 2, block_size, num_kv_heads, head_size]`` (NHD; HND: heads before tokens), or a pair of
    views ``[blocks, block_size, num_kv_heads, head_size]`` with the same strides.
    """

    name = "flashinfer"
    impl_class = FlashInferImpl
    state_class = FlashInferState
    list_layout = "flashinfer"
    plans_class: type[KeyPlans] = KeyPlans

    def __init__(self, config: BackendConfig) -> None:
        super().__init__(config)
        self.decode_kernel = _decode_kernel(config)
        self.shape = self.make_shape(self.kv_cache_torch_dtype())
        options = config.options
        self._asked_plan = self._plan_option()
        self._branches = bool(options.get("plan_branch")) and self._is_cuda
        self._side: Any = None
        self.plan_of_captured, self.why_plan = self._no_plan_yet()
        """Where captured sizes are planned, ``device`` or ``host``, and why; of those captured last."""
        self.workspace = Workspace(
            config.device,
            int(options.get("workspace_mib", 64)) << 20,
            int(options.get("max_workspace_mib", 1024)) << 20,
        )
        self.num_blocks = 0
        """Of the largest cache that was allocated here; 0: none was."""
        self._tools = Tools(
            self.library(),
            self.workspace,
            self.decode_kernel,
            CascadeRule() if options.get("cascade") else None,
            lru_cache(maxsize=1)(lambda: xqa.workspace(config.device)),
            proves=self._asked_plan != device_plan.HOST,
        )
        self._plans: dict[PlanKey, KeyPlans] = {}
        self._owner: Callable[[], Any] = _no_owner
        self._step, self._follows, self._checks_tables = -1, False, False
        self._has_planned = False
        self._event: Any = None

    def library(self) -> Library:
        """What is called of FlashInfer."""
        return flashinfer()

    def plans_of(self, key: PlanKey) -> KeyPlans:
        """The plans that layers of ``key`` share."""
        found = self._plans.get(key)
        if found is None:
            settings = LayerSettings(self.shape, key.scale, key.sliding_window, key.logits_soft_cap)
            found = self._plans[key] = self.plans_class(self._tools, settings)
        return found

    def make_shape(self, cache_dtype: torch.dtype) -> Shape:
        """What all layers share; ValueError for a configuration that the kernels cannot run."""
        config = self.config
        return Shape(
            config.num_heads,
            config.num_kv_heads,
            config.head_size,
            config.block_size,
            getattr(torch, config.dtype),
            cache_dtype,
            config.kv_cache_layout,
            config.device,
            self.decode_kernel != CUDA_CORES,
        )

    def check_modules(self, window: int | None, soft_cap: float | None) -> None:
        """ValueError where a layer's module is not built and cannot be compiled here: better than in a step."""
        if not self._is_cuda:
            return
        config = self.config
        names = checks.modules_of(
            (config.dtype, config.kv_cache_dtype, config.head_size),
            self.decode_kernel,
            config.num_heads // config.num_kv_heads,
            config.block_size,
            window=window is not None,
            soft_cap=soft_cap is not None,
            cascade=self._tools.rule is not None,
        )
        name = next((name for name in names if modules.find(name) is None), None)
        if name is not None and (why := modules.no_compiler()):
            raise ValueError(
                f"sliding_window: {window} with logits_soft_cap {soft_cap} needs the module {name}, which is not "
                f"built, and {why}; {checks.INSTALL}"
            )

    def plan(self, metadata: AttentionMetadata) -> None:
        """Plans the step for every distinct key of the layers; see the base class. ValueError for a view of a step of
        whose lengths the host has bounds: only the graph of the whole step plans by the device's.
        """
        if metadata.builder is None and metadata.host_lengths != "exact":
            raise ValueError(
                "metadata: a view of a step whose lengths the device alone knows, and FlashInfer plans by the host's; "
                "plan the whole step"
            )
        self._settle(metadata)
        if self._checks_tables:
            check_table(metadata, self.shape.block_size, self.num_blocks)
        pages = pages_of(metadata, self.shape.block_size, self.num_blocks, self.from_host)
        for key in self.plan_keys:
            plans = self._plans.get(key) or self.plans_of(key)
            if key.sliding_window is not None:
                _check_window(metadata)
            plans.plan(metadata, pages)
        if metadata.use_cuda_graph and metadata.builder is not None and self._tools.proves:
            self._settle_plan(metadata)
        if not self._follows:
            self._note_copies()

    def plan_own_keys(self, plans: KeyPlans, step: ProfiledStep, longest: int) -> StepPlan:
        """Plans a layer over the step's own keys, in the middle of a step: after what a builder waits for."""
        self._wait_for_copies()
        try:
            return plans.profiled(step, longest)
        finally:  # a plan that fails may have begun to copy
            self._note_copies()

    def plan_again(self, metadata: AttentionMetadata) -> None:
        """Plans a padded step of the list builder, where another step of its captured size was planned since."""
        if any(self.plans_of(key).is_of_another(metadata) for key in self.plan_keys):
            self.plan(metadata)

    def record_plan(self, metadata: AttentionMetadata) -> bool:
        """Records the kernel that plans each step of a captured size; False where the host goes on planning them."""
        sizes = self._sizes_of(metadata)
        node = sizes[0].device_plan if sizes else None
        if node is None or any(size.device_plan is not node for size in sizes) or not is_capturing(self.config.device):
            return False
        planned = self._beside(node) if self._branches else launch(node)
        for size in sizes:
            size.run.node, size.run.planned = node, planned
        return True

    def prepare_capture(self, metadata: AttentionMetadata, builder: CommonMetadataBuilder) -> None:
        """Makes the wrappers that a captured size of the list builder needs, for every key."""
        for key in self.plan_keys:
            self.plans_of(key).capture_of_list_builder(metadata, builder)

    def kv_cache_shape(self, num_blocks: int, block_size: int, num_kv_heads: int, head_size: int) -> tuple[int, ...]:
        """Blocks first, then keys and values: a block is one piece of memory."""
        if self.config.kv_cache_layout == "HND":
            return (num_blocks, 2, num_kv_heads, block_size, head_size)
        return (num_blocks, 2, block_size, num_kv_heads, head_size)

    def allocate_kv_cache(self, num_blocks: int) -> Any:
        """See the base class; the pool that steps of the list builder are checked against."""
        cache = super().allocate_kv_cache(num_blocks)
        self.num_blocks = max(self.num_blocks, num_blocks)
        self._owner, self._step = _no_owner, -1  # whoever plans next is compared with the pool
        return cache

    def _beside(self, node: DevicePlan) -> Any:
        """Records ``node`` on a stream of its own, behind all that was recorded; the event that attention waits for."""
        self._side = self._side or torch.cuda.Stream(self.config.device)  # type: ignore[no-untyped-call]
        self._side.wait_stream(torch.cuda.current_stream())
        planned = torch.cuda.Event()  # type: ignore[no-untyped-call]
        with torch.cuda.stream(self._side):
            launch(node)
            planned.record()
        return planned

    def _plan_option(self) -> str:
        return str(self.config.options.get("plan", device_plan.AUTO))

    def _no_plan_yet(self) -> tuple[str, str]:
        if self._asked_plan == device_plan.HOST:
            return device_plan.HOST, "asked for by the option plan"
        if self.decode_kernel == XQA:
            return device_plan.HOST, "decodes of one token by xqa have no plan, and no others were captured"
        return device_plan.HOST, "no size was captured yet"

    def _sizes_of(self, metadata: AttentionMetadata) -> list[CapturedDecode | CapturedTrees]:
        """The captured sizes of a padded step, one for each key; none where a key has no plan of the size."""
        found = [self.plans_of(key).captured_of(metadata) for key in self.plan_keys]
        sizes = [size for size in found if size is not None]
        return sizes if len(sizes) == len(found) else []

    def _settle_plan(self, metadata: AttentionMetadata) -> None:
        """Makes the node that plans the sizes of a step, all keys in one launch, where the device can plan each."""
        sizes = self._sizes_of(metadata)
        if not sizes or all(size.device_plan is sizes[0].device_plan is not None for size in sizes):
            return
        refused = next((size for size in sizes if size.layout is None), None)
        if refused is None:
            rows = [size.table_row() for size in sizes if not isinstance(size, CapturedTrees)]
            node = DevicePlan(metadata.paged_kv_indptr, rows)
            for size in sizes:
                size.device_plan = node
            self.plan_of_captured, self.why_plan = device_plan.DEVICE, sizes[0].why_plan
            return
        if self._asked_plan == device_plan.DEVICE:
            raise ValueError(f"options: plan=device asked for, but {refused.why_plan}; give auto or host")
        if self.why_plan != refused.why_plan:
            # Those of draft trees never are on the device: that is no surprise.
            level = logging.INFO if isinstance(refused, CapturedTrees) else logging.WARNING
            _log.log(level, "flashinfer: captured decodes are planned on the host: %s", refused.why_plan)
        self.plan_of_captured, self.why_plan = device_plan.HOST, refused.why_plan

    @property
    def _is_cuda(self) -> bool:
        return self.config.device.startswith("cuda")

    def _settle(self, metadata: AttentionMetadata) -> None:
        """Until the last plan's copies have left their pinned memory, which the next plan writes to. A builder's
        first step is where its pool is compared with the cache.

        The persistent builder has waited for its last step's receipt, which comes after them. Other plans, of
        another builder, of the list builder, by hand, are waited for here.
        """
        owner = metadata.builder
        self._follows = owner is not None and owner is self._owner() and metadata.step > self._step
        if not self._follows:
            refuse_while_capturing(self.config.device, "plan")
            self._checks_tables = owner is not None and _check_pool(metadata, self.num_blocks)
            if owner is None or owner is not self._owner():
                self._owner, self._step = _no_owner if owner is None else ref(owner), -1
        if owner is not None:
            self._step = max(self._step, metadata.step)
        if self._event is not None or not self._follows:
            self._wait_for_copies()

    def _wait_for_copies(self) -> None:
        """Until no plan's copy is under way."""
        if self._event is not None:
            self._event.synchronize()
        elif self._is_cuda and self._has_planned:
            torch.cuda.current_stream().synchronize()
        self._event, self._has_planned = None, True

    def _note_copies(self) -> None:
        """The next plan waits for the copies of this one."""
        if self._is_cuda:
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._event.record()


def _architecture(device: str) -> str:
    """As a spec names it, such as ``cuda:sm_90``; that too where there is no CUDA device, as in tests."""
    if not device.startswith("cuda"):
        return "cuda:sm_90"
    return "cuda:sm_{}{}".format(*torch.cuda.get_device_capability(device))


def _decode_kernel(config: BackendConfig) -> str:
    """The kernel of decodes of one token; ValueError for combinations that FlashInfer lacks, which no spec can say."""
    if config.kv_cache_dtype in ("float16", "bfloat16") and config.kv_cache_dtype != config.dtype:
        raise ValueError(
            f"kv_cache_dtype: {config.kv_cache_dtype} found beside {config.dtype}; give auto, fp8_e4m3 or fp8_e5m2"
        )
    group = config.num_heads // config.num_kv_heads
    asked = str(config.options.get("decode", "auto"))
    kernel = checks.automatic(group, config.variant) if asked == "auto" else asked
    problem = ""
    if config.variant in checks.XQA_VARIANTS and kernel != XQA:
        problem = checks.why_not_xqa(kernel)
    elif kernel == XQA:
        problem = checks.xqa_problem(
            group, config.block_size, config.logits_soft_cap, config.kv_cache_dtype, _architecture(config.device)
        )
    elif kernel == CUDA_CORES:
        problem = checks.cuda_core_problem(group)
    if problem:
        raise ValueError(f"options: {problem}")
    return kernel


def _check_pool(metadata: AttentionMetadata, num_blocks: int) -> bool:
    """Whether each step's tables are to be checked: a batch that was told its pool refuses ids beyond it. ValueError
    where that is larger than the largest cache, of ``num_blocks``; 0: not known."""
    pool = pool_of(metadata)
    if num_blocks and pool is not None and pool > num_blocks:
        raise ValueError(
            f"num_blocks: the batch takes block ids below {pool}, but the largest cache of this backend has "
            f"num_blocks {num_blocks}; give both the same number"
        )
    return pool is None and num_blocks > 0


def _check_window(metadata: AttentionMetadata) -> None:
    """ValueError for windowed prompts of the list builder: their early tokens have no slot, and every key is read from
    the cache."""
    if not metadata.from_groups or not metadata.num_prefills:
        return
    slots = metadata.host.slot_mapping[: metadata.num_prefill_tokens]
    if len(slots) and slots.max() >= 0 and slots.min() < 0:
        raise ValueError(
            "metadata: the list builder gives the early tokens of a windowed prompt no slot, and FlashInfer reads "
            "every key from the cache; make the CommonMetadataBuilder without sliding_window, or use MetadataBuilder"
        )
