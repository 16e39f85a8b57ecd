"""Which kernels run which tokens of a step: planned once a step for all layers that share a plan key."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import WeakKeyDictionary, WeakValueDictionary, ref

from attn_flashinfer.captured_trees import CapturedTrees
from attn_flashinfer.cascade import Cascade
from attn_flashinfer.pages import Pages, tensor_over
from attn_flashinfer.profiling import has_no_pages
from attn_flashinfer.trees import MOST_TOKENS, MaskMemory, has_masks, holds_trees, trees_of
from attn_flashinfer.wrappers import CapturedDecode, EagerAppend, EagerDecode, LayerSettings
from attn_flashinfer.xqa import XqaDecode

if TYPE_CHECKING:
    from attn_flashinfer.library import Library
    from attn_flashinfer.profiling import ProfiledStep
    from attn_flashinfer.workspace import Workspace
    from attncore import AttentionMetadata
    from attncore.builder import CascadeRule, CommonMetadataBuilder


Place = tuple[int, int, int]
"""What a captured size is known by: rows, tokens of each, and where the graph reads its pages."""


class Part(NamedTuple):
    """Tokens start..stop of a step, and the call that attends for them: ``run(query, caches, out=..., ...)``; that of
    XQA takes the layer's sinks, and a tensor as ``k_scale``."""

    run: Callable[..., Any]
    start: int
    stop: int
    by_xqa: bool = False


@dataclass(slots=True)
class StepPlan:
    """A step's parts, in the order of its tokens; padding is in none of them.

    The metadata is held weakly, since it holds its builder.
    """

    metadata: Callable[[], Any]
    parts: tuple[Part, ...]


@dataclass(frozen=True)
class Tools:
    """What the plans of a backend share."""

    library: Library
    workspace: Workspace
    kernel: str
    """Of decodes of one token: tensor_cores, cuda_cores, xqa."""
    rule: CascadeRule | None
    """When two passes over a shared prefix pay; None: never."""
    xqa_workspace: Callable[[], Any]
    proves: bool = False
    """Whether captured sizes are to be planned on the device, where that gives FlashInfer's own plans."""


class KeyPlans:
    """The plans of the layers of one key: that of the last eager step, and those of captured sizes.

    An eager step is run before the next one is planned. A captured size has a wrapper of its own, whose plan is renewed
    before each replay.
    """

    def __init__(self, tools: Tools, settings: LayerSettings) -> None:
        self._tools, self.settings = tools, settings
        self.step = StepPlan(no_step, ())
        """Of the step planned last."""
        self._decode: EagerDecode | None = None
        self._append: dict[str, EagerAppend] = {}
        self._cascade: Cascade | None = None
        self._captured: WeakValueDictionary[Place, CapturedDecode | CapturedTrees] = WeakValueDictionary()
        self._sizes: WeakKeyDictionary[Any, dict[Place, CapturedDecode | CapturedTrees]] = WeakKeyDictionary()
        """By builder: they live as long as it does."""
        self._of_list_builder: WeakKeyDictionary[Any, dict[int, CapturedDecode]] = WeakKeyDictionary()
        self._newest: Callable[[], Any] = no_step
        """The builder of the list builder that captured last."""
        self._of_steps: WeakKeyDictionary[Any, tuple[int, Callable[[], Any]]] = WeakKeyDictionary()
        """By captured size of the list builder: the number of the step that it was planned for last, and that step."""
        self._plans_no_decode = tools.kernel == "xqa"

    def plan(self, metadata: AttentionMetadata, pages: Pages) -> None:
        """Plans a step. Reads host arrays and integers alone."""
        self.step = StepPlan(no_step, ())  # a plan that fails may have taken the last one's wrappers
        if has_no_pages(metadata):
            return  # each layer plans over its own keys
        if not metadata.use_cuda_graph:
            self.step = StepPlan(ref(metadata), self._parts(metadata, pages))
        elif metadata.builder is not None:
            self.step = self._padded(metadata, pages)
        else:
            captured = self._captured_of_list_builder(metadata)
            if captured is None:  # padded, and run without a graph
                self.step = StepPlan(ref(metadata), self._parts(metadata, pages))
            else:
                self._of_steps.pop(captured, None)  # a plan that fails may have taken the last one's place
                captured.plan(pages)
                self._of_steps[captured] = metadata.step, ref(metadata)
                self.step = StepPlan(ref(metadata), (Part(captured.run, 0, metadata.num_reqs),))

    def profiled(self, step: ProfiledStep, longest: int) -> StepPlan:
        """The plan of a profiling run, whose cache one layer has made; no query is longer than ``longest``."""
        self.step = StepPlan(no_step, ())  # the wrapper is that of prefills
        append = self._append.get("prefill")
        if append is None:
            append = self._append["prefill"] = EagerAppend(self._tools.library, self._tools.workspace, self.settings)
        append.plan(step.pages, 0, len(step.starts) - 1, step.starts, longest)
        return StepPlan(no_step, (Part(append.run, 0, int(step.starts[-1])),))

    def find(self, metadata: AttentionMetadata) -> StepPlan:
        """The plan of a step that is not the very object planned last; ValueError where there is none."""
        step = self.step
        planned = step.metadata()
        if planned is not None and metadata.host is planned.host:
            return step
        if metadata.use_cuda_graph:
            place = _place(metadata)
            if self._plans_no_decode and place[1] == 1:
                return self._unplanned(metadata)
            captured = self._captured.get(place)
            if captured is None:  # a step of the list builder, or one that came from another process
                captured = self._newest_sizes().get(metadata.num_reqs)
                planned = captured is not None and not self._is_of_another(captured, metadata)
            else:
                planned = not metadata.from_groups or self._number(captured) == metadata.step
            if captured is not None and planned:
                _ = metadata.paged_kv_indptr  # of adopted steps it is made in the graph, or now, where there is none
                return StepPlan(no_step, (Part(captured.run, 0, captured.num_reqs * captured.query_len),))
        raise ValueError(
            "metadata: not of the step that was planned last; FlashInfer keeps one plan of eager steps, so run all "
            "layers of a step before the next is built (or plan it again: backend.plan(metadata))"
        )

    def capture_of_list_builder(self, metadata: AttentionMetadata, builder: CommonMetadataBuilder) -> None:
        """Takes what a captured size of the list builder needs, before its first plan."""
        if not self._plans_no_decode:
            captured = self._capture(metadata, 1, metadata.paged_kv_indices, proves=False)
            sizes, self._newest = self._of_list_builder.setdefault(builder, {}), ref(builder)
            sizes[metadata.num_reqs] = self._captured[_place(metadata)] = captured
            self._sizes.setdefault(builder, {})[_place(metadata)] = captured  # of another state of the builder, too

    def is_of_another(self, metadata: AttentionMetadata) -> bool:
        """Whether a padded step of the list builder is replayed in a captured size whose plan is of another step."""
        captured = self._captured_of_list_builder(metadata)
        return captured is not None and self._is_of_another(captured, metadata)

    def _is_of_another(self, captured: CapturedDecode, metadata: AttentionMetadata) -> bool:
        """The same of a captured size. Steps that no builder of this process built have no number of their own."""
        number, step = self._of_steps.get(captured, (-1, no_step))
        return number != metadata.step or (metadata.source is None and step() is not metadata)

    def _number(self, captured: CapturedDecode | CapturedTrees) -> int:
        """The number of the step of the list builder that a captured size was planned for last; -1: none."""
        return self._of_steps.get(captured, (-1, no_step))[0]

    def captured_of(self, metadata: AttentionMetadata) -> CapturedDecode | CapturedTrees | None:
        """The captured size that a padded step of the persistent builder, or an adopted one, was planned for."""
        return self._captured.get(_place(metadata))

    def _captured_of_list_builder(self, metadata: AttentionMetadata) -> CapturedDecode | None:
        """The captured size that a padded step will be replayed in: by its buffers, or by who built it.

        A step that came from another process has neither here: it is of the builder that captured last.
        """
        if "paged_kv_indptr" in vars(metadata):
            found = self._captured.get(_place(metadata))
            if found is not None and not isinstance(found, CapturedTrees):
                return found
        source = metadata.source
        sizes = self._newest_sizes() if source is None else self._of_list_builder.get(source.builder, {})
        return sizes.get(metadata.num_reqs)

    def _newest_sizes(self) -> dict[int, CapturedDecode]:
        builder = self._newest()
        return {} if builder is None else self._of_list_builder.get(builder, {})

    def _padded(self, metadata: AttentionMetadata, pages: Pages) -> StepPlan:
        """The plan of a step that is padded to a captured size of the persistent builder."""
        place = _place(metadata)
        num_reqs, query_len, _ = place
        if self._plans_no_decode and query_len == 1:
            return self._unplanned(metadata)
        captured = self._captured.get(place)
        if captured is None:
            if has_masks(metadata) and 1 < query_len <= MOST_TOKENS:
                captured = self._capture_trees(metadata, query_len, pages.indices)
            else:
                captured = self._capture(metadata, query_len, pages.indices, proves=self._tools.proves)
            self._captured[place] = self._sizes.setdefault(metadata.builder, {})[place] = captured
        if isinstance(captured, CapturedTrees):
            captured.plan(pages, metadata.host.tree_mask)
        else:
            captured.plan(pages)
        return StepPlan(ref(metadata), (Part(captured.run, 0, num_reqs * query_len),))

    def _unplanned(self, metadata: AttentionMetadata) -> StepPlan:
        return StepPlan(ref(metadata), (self._xqa(metadata, 0, metadata.num_reqs, 0),))

    def _capture(self, metadata: AttentionMetadata, query_len: int, indices: Any, *, proves: bool) -> CapturedDecode:
        return CapturedDecode(
            self._tools.library,
            self._tools.workspace,
            self.settings,
            indptr=metadata.paged_kv_indptr,
            indices=indices,
            last_page_len=metadata.paged_kv_last_page_len,
            query_len=query_len,
            max_seq_len=metadata.max_seq_len,
            proves=proves,
        )

    def _capture_trees(self, metadata: AttentionMetadata, query_len: int, indices: Any) -> CapturedTrees:
        num_reqs, longest, others = metadata.num_reqs, metadata.max_seq_len, []
        if metadata.builder is not None:
            longest = metadata.builder.batch.max_model_len  # also where a size is first planned in a step
            others = list(self._sizes.get(metadata.builder, {}).values())
        nbytes = CapturedTrees.mask_bytes(num_reqs, query_len, longest)
        memories = [size.memory for size in others if isinstance(size, CapturedTrees)]
        memory = next((one for one in memories if len(one.buffer) >= nbytes), None)
        return CapturedTrees(
            self._tools.library,
            self._tools.workspace,
            self.settings,
            indices=indices,
            num_reqs=num_reqs,
            query_len=query_len,
            max_seq_len=longest,
            memory=memory or MaskMemory(self.settings.shape.device, nbytes),
        )

    def _parts(self, metadata: AttentionMetadata, pages: Pages) -> tuple[Part, ...]:
        """The parts of an eager step: decodes of one token, decodes of several, prefills; the other way round behind
        the list builder."""
        rule = self._tools.rule
        if rule is not None and self.settings.window is None and not holds_trees(metadata):
            found = self._cascaded(metadata, pages, rule)
            if found is not None:
                return (found,)
        num_prefills = metadata.num_prefills
        num_decodes = metadata.num_reqs - num_prefills
        decodes = prefills = None
        if num_decodes:
            decodes_first = metadata.decodes_first
            row, token = (0, 0) if decodes_first else (num_prefills, metadata.num_prefill_tokens)
            if metadata.max_decode_query_len > 1:
                decodes = self._appended("verify", metadata, pages, row, row + num_decodes, token)
            elif self._plans_no_decode:
                decodes = self._xqa(metadata, row, row + num_decodes, token)
            else:
                if self._decode is None:
                    self._decode = EagerDecode(self._tools.library, self._tools.workspace, self.settings)
                self._decode.plan(pages, row, row + num_decodes)
                decodes = Part(self._decode.run, token, token + num_decodes)
            if not num_prefills:
                return (decodes,)
        if num_prefills:
            row, token = (num_decodes, metadata.num_decode_tokens) if metadata.decodes_first else (0, 0)
            prefills = self._appended("prefill", metadata, pages, row, row + num_prefills, token)
        return tuple(part for part in (decodes, prefills) if part is not None)

    def _appended(
        self, name: str, metadata: AttentionMetadata, pages: Pages, first: int, last: int, token: int
    ) -> Part:
        """Rows of several tokens, which begin at ``token``."""
        append = self._append.get(name)
        if append is None:
            append = self._append[name] = EagerAppend(self._tools.library, self._tools.workspace, self.settings)
        starts = metadata.host.query_start_loc[first : last + 1]
        if token:
            starts = starts - starts[0]
        stop = token + int(starts[-1])
        masks = trees_of(metadata, token, stop)
        if masks is not None and name != "verify":
            raise ValueError(
                "metadata: draft trees among the prefills of a step; flashinfer runs them as decodes of several "
                "tokens, as steps of MetadataBuilder have them"
            )
        append.plan(pages, first, last, tensor_over(starts), metadata.max_query_len, masks)
        return Part(append.run, token, stop)

    def _xqa(self, metadata: AttentionMetadata, first: int, last: int, token: int) -> Part:
        run = XqaDecode(self._tools.library, self._tools.xqa_workspace(), self.settings, metadata, first, last).run
        return Part(run, token, token + last - first, by_xqa=True)

    def _cascaded(self, metadata: AttentionMetadata, pages: Pages, rule: CascadeRule) -> Part | None:
        if self._cascade is None:
            self._cascade = Cascade(self._tools.library, self._tools.workspace, self.settings, rule)
        if not self._cascade.plan(metadata, pages):
            return None
        return Part(self._cascade.run, 0, int(metadata.host.query_start_loc[-1]))


def no_step() -> None:
    """Stands for the metadata of no step."""


def _place(metadata: AttentionMetadata) -> Place:
    num_reqs = metadata.num_reqs
    return num_reqs, metadata.num_tokens // num_reqs, metadata.paged_kv_indptr.data_ptr()
