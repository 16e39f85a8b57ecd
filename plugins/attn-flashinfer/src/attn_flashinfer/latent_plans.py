"""Plans of layers over latent caches: a step's rows in one plan, whatever they are."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from attn_flashinfer.latent_wrappers import CapturedLatent, EagerLatent
from attn_flashinfer.pages import Pages, tensor_over
from attn_flashinfer.plans import KeyPlans, Part, StepPlan, no_step

if TYPE_CHECKING:
    from attn_flashinfer.profiling import ProfiledStep
    from attncore import AttentionMetadata


class LatentPlans(KeyPlans):
    """The plans of the layers of one key over latent caches."""

    _eager: EagerLatent | None = None

    def profiled(self, step: ProfiledStep, longest: int) -> StepPlan:
        """See the base class."""
        self.step = StepPlan(no_step, ())
        count = int(step.starts[-1])
        run = self._planned(step.pages, step.starts, count, longest)
        return StepPlan(no_step, (Part(run, 0, count),))

    def _parts(self, metadata: AttentionMetadata, pages: Pages) -> tuple[Part, ...]:
        starts = metadata.host.query_start_loc
        count, num_rows = int(starts[-1]), len(starts) - 1  # without the padding of the list builder
        if not count:
            return ()
        run = self._planned(pages.rows(0, num_rows), tensor_over(starts), count, metadata.max_query_len)
        return (Part(run, 0, count),)

    def _planned(self, pages: Pages, starts: Any, count: int, longest: int) -> Any:
        if self._eager is None:
            self._eager = EagerLatent(self._tools.library, self._tools.workspace, self.settings)
        self._eager.plan(pages, starts, count, longest)
        return self._eager.run

    def _capture(self, metadata: AttentionMetadata, query_len: int, indices: Any, *, proves: bool) -> Any:
        return CapturedLatent(
            self._tools.library,
            self._tools.workspace,
            self.settings,
            indices=indices,
            num_reqs=metadata.num_reqs,
            query_len=query_len,
        )
