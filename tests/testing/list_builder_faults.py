"""Faults of steps that the backend's own list builder plans, and of captured sizes that its state writes."""

from testing.crossed_faults import forgets
from testing.faulty_backend import Fault, forward

EAGER, CAPTURED = "test_steps_of_its_own_list_builder[None-False]", "test_captured_sizes_of_its_own_list_builder"
WRONG_WHERE_PLANNED = forward(
    "return whole(query, key, value, kv_cache, metadata, output).div_(1 + metadata.kept.get('wrong', False))"
)


def _plan(where: str) -> str:
    """Code of a plan that is wrong ``where``, and of a layer that goes by it."""
    return (
        f"""
def plan_layers(self, metadata, key):
    metadata.kept["wrong"] = metadata.kept.get("wrong", False) or ({where})
Backend.plan_layers = plan_layers
"""
        + WRONG_WHERE_PLANNED
    )


LIST_BUILDER_FAULTS = (
    Fault(
        "plan_for_a_list_builder_is_wrong",
        EAGER,
        "; the step is the list builder's (metadata.from_groups)",
        _plan("metadata.source is not None"),
    ),
    Fault(
        "plan_of_chunks_for_a_list_builder_is_wrong",
        "test_steps_of_its_own_list_builder[None-True]",
        "; the step is the list builder's (metadata.from_groups)",
        _plan("metadata.source is not None and bool(metadata.host.context_lens[: metadata.num_prefills].any())"),
    ),
    Fault(
        "plan_for_windows_of_a_list_builder_is_wrong",
        "test_steps_of_its_own_list_builder[5-False]",
        "; the step is the list builder's (metadata.from_groups)",
        _plan("metadata.source is not None and key.sliding_window is not None"),
    ),
    Fault(
        "a_step_that_advanced_is_not_planned_anew",
        EAGER,
        "decode of 1 after",
        """
def plan_layers(self, metadata, key):
    if metadata.source is not None:
        lens = vars(self).setdefault("lens", {}).setdefault(id(metadata.source.host), np.array(metadata.host.seq_lens))
        metadata.kept["lens"] = lens
Backend.plan_layers = plan_layers
"""
        + forward("""
lens = metadata.kept.get("lens")
if lens is not None and not metadata.num_prefills and len(lens) == metadata.num_reqs:
    whole(query, key, value, kv_cache, metadata, output)
    metadata = changed(metadata, seq_lens=lens)
return whole(query, key, value, kv_cache, metadata, output)
"""),
    ),
    Fault(
        "plans_in_the_lengths_of_a_list_builder",
        EAGER,
        "plan changed metadata.host.seq_lens; other layers and later steps read it: work on a copy",
        """
def plan_layers(self, metadata, key):
    if metadata.source is not None:
        metadata.seq_lens.add_(1)
Backend.plan_layers = plan_layers
""",
    ),
    Fault(
        "page_lists_without_their_layout",
        EAGER,
        "its spec declares page lists, which steps of list_layout = 'common' have not; set list_layout = 'flashinfer'",
        forward("metadata.paged_kv_indices\nreturn whole(query, key, value, kv_cache, metadata, output)"),
        "host_needs=ARRAYS, device_needs=ARRAYS",
    ),
    Fault(
        "plan_for_a_captured_size_of_the_list_builder_is_wrong",
        CAPTURED,
        "; the step was built by backend.get_builder_cls() for a captured size",
        _plan("metadata.source is not None and metadata.use_cuda_graph"),
    ),
    Fault(
        "a_captured_size_of_the_list_builder_with_the_plan_of_its_capture",
        CAPTURED,
        "whose arrays and metadata.kept are that step's",
        """
def plan_layers(self, metadata, key):
    if metadata.use_cuda_graph:
        lens = vars(self).setdefault("lens", {}).setdefault(metadata.num_reqs, np.array(metadata.host.seq_lens))
        metadata.kept["lens"] = lens
Backend.plan_layers = plan_layers
"""
        + forward("""
if metadata.builder is None and "lens" in metadata.kept:
    whole(query, key, value, kv_cache, metadata, output)
    metadata = changed(metadata, seq_lens=metadata.kept["lens"])
return whole(query, key, value, kv_cache, metadata, output)
"""),
    ),
    Fault(
        "a_state_whose_build_prepares_nothing",
        CAPTURED,
        "begin_forward: this step is padded for a graph, but the buffers do not hold it",
        """
from attncore import AttentionState

class State(AttentionState):
    def build(self, groups, cuda_graph_pad_size):
        return self.builder.build(groups, cuda_graph_pad_size)

Backend.state_class = State
""",
    ),
    Fault(
        "a_state_that_prepares_a_size_once",
        CAPTURED,
        "whose arrays and metadata.kept are that step's",
        """
from attncore import AttentionState

class State(AttentionState):
    def prepare(self, metadata):
        kept = vars(self).setdefault("sizes", {})
        if metadata.num_reqs not in kept:
            kept[metadata.num_reqs] = super().prepare(metadata)
        return kept[metadata.num_reqs]

    build = lambda self, groups, pad: (step := self.builder.build(groups, pad), self.prepare(step))[0]

    def begin_forward(self, metadata):
        pass

Backend.state_class = State
""",
    ),
    Fault(
        "a_captured_size_with_the_plan_of_the_last_build",
        CAPTURED,
        "whose arrays and metadata.kept are that step's",
        """
def plan_layers(self, metadata, key):
    if metadata.use_cuda_graph and metadata.builder is None:
        vars(self).setdefault("lens", {})[metadata.num_reqs] = np.array(metadata.host.seq_lens)
Backend.plan_layers = plan_layers
"""
        + forward("""
if metadata.use_cuda_graph and metadata.builder is None:
    whole(query, key, value, kv_cache, metadata, output)
    metadata = changed(metadata, seq_lens=vars(self.backend)["lens"][metadata.num_reqs])
return whole(query, key, value, kv_cache, metadata, output)
"""),
    ),
    Fault(
        "no_cap_in_steps_of_its_own_list_builder",
        "test_a_feature_of_its_own_list_builder[logits_soft_cap]",
        "it is as if the layer had no logits_soft_cap",
        forgets("metadata.from_groups and not metadata.use_cuda_graph", "logits_soft_cap"),
    ),
    Fault(
        "no_window_in_a_captured_size_of_the_list_builder",
        "test_a_feature_of_captured_sizes_of_its_own_list_builder[sliding_window]",
        "it is as if the layer had no sliding_window",
        forgets("metadata.from_groups and metadata.use_cuda_graph", "sliding_window"),
    ),
)
