"""Faults in the manner of libraries that plan a step (flash, flashinfer): plans that are kept, segments, pages."""

from testing.faulty_backend import USUAL_SCALE, Fault, forward

PLANNED_LENGTHS = """
from types import SimpleNamespace

def plan_layers(self, metadata, key):
    ({place}).planned = np.array(metadata.host.seq_lens)
Backend.plan_layers = plan_layers
""" + forward(
    """
self, layer = self.backend, self
lens, self = ({place}).planned, layer
if len(lens) == metadata.num_reqs:
    whole(query, key, value, kv_cache, metadata, output)
    metadata = changed(metadata, seq_lens=lens)
return whole(query, key, value, kv_cache, metadata, output)
"""
)

PLAN_FAULTS = (
    Fault(
        "plan_by_the_memory_of_the_lengths",
        "test_steps_of_a_builder_that_uses_its_metadata_again[1]",
        "decode of 1 after",
        forward(
            """
place = metadata.host.seq_lens.ctypes.data, metadata.num_reqs
longest = self.__dict__.setdefault("kept", {}).setdefault(place, metadata.max_seq_len)
if not metadata.num_prefills:
    metadata = changed(metadata, seq_lens=np.minimum(metadata.host.seq_lens, longest))
return whole(query, key, value, kv_cache, metadata, output)
"""
        ),
    ),
    Fault(
        "plan_by_the_number_of_requests",
        "test_steps_of_a_builder_that_uses_its_metadata_again[2]",
        "decode of 1 after",
        forward(
            """
longest = self.__dict__.setdefault("kept", {}).setdefault(metadata.num_reqs, metadata.max_seq_len)
if not metadata.num_prefills:
    metadata = changed(metadata, seq_lens=np.minimum(metadata.host.seq_lens, longest))
return whole(query, key, value, kv_cache, metadata, output)
"""
        ),
    ),
    Fault(
        "graph_that_says_that_it_plans",
        "test_captured_sizes_over_changing_batches[1]",
        "the output differs from dense float32 attention by",
        """
def plan(self, metadata):
    if metadata.use_cuda_graph:
        self.__dict__.setdefault("planned", {})[metadata.num_reqs] = np.array(metadata.host.seq_lens)
Backend.plan, Backend.record_plan = plan, lambda self, metadata: True
"""
        + forward(
            """
if metadata.use_cuda_graph:
    whole(query, key, value, kv_cache, metadata, output)
    lens = np.maximum(self.backend.planned[metadata.num_reqs], metadata.host.query_lens)
    metadata = changed(metadata, seq_lens=lens)
return whole(query, key, value, kv_cache, metadata, output)
"""
        ),
    ),
    Fault(
        "plan_of_the_table_before",
        "test_steps_of_a_builder_that_uses_its_metadata_again[1]",
        "something of an earlier step or call was kept",
        forward(
            """
table = metadata.host.block_table.copy()
old = self.__dict__.setdefault("tables", {}).get(table.shape)
self.tables[table.shape] = table
if old is not None and not metadata.num_prefills:
    whole(query, key, value, kv_cache, metadata, output)
    metadata = changed(metadata, block_table=old)
return whole(query, key, value, kv_cache, metadata, output)
"""
        ),
    ),
    Fault(
        "plan_without_the_cap_in_its_key",
        "test_two_layers_with_other_values",
        "it is as if its features were those of layer",
        forward(
            """
from dataclasses import replace
if self._scoring.logits_soft_cap:
    cap = metadata.kept.setdefault("cap", self._scoring.logits_soft_cap)
    self._scoring = replace(self._scoring, logits_soft_cap=cap)
return whole(query, key, value, kv_cache, metadata, output)
"""
        ),
    ),
    Fault(
        "output_kept_with_the_step",
        "test_layers_that_differ_in_every_declared_feature",
        "of 17 that share a step, and differ",
        forward(
            """
answer = whole(query, key, value, kv_cache, metadata, output)
return metadata.kept.setdefault("output", answer).clone()
"""
        ),
    ),
    Fault(
        "segments_in_the_wrong_order",
        "test_mixed_batch",
        "differs from dense",
        forward(
            """
answer = whole(query, key, value, kv_cache, metadata, output)
if metadata.num_prefills and metadata.num_decode_tokens:
    own = answer[: metadata.num_tokens]
    own.copy_(own.roll(metadata.num_decode_tokens, 0))
return answer
"""
        ),
    ),
    Fault(
        "chunks_beside_decodes_taken_for_prompts",
        "test_mixed_batch",
        "prefill of",
        forward(
            """
if metadata.num_prefills and metadata.num_decodes:
    tokens = np.diff(metadata.host.query_start_loc)
    whole(query, key, value, kv_cache, metadata, output)
    metadata = changed(metadata, seq_lens=np.where(tokens > 1, tokens, metadata.host.seq_lens).astype(np.int32))
return whole(query, key, value, kv_cache, metadata, output)
"""
        ),
    ),
    Fault(
        "decodes_first_in_steps_of_prompts_first",
        "test_steps_of_the_list_builder",
        "rows or tokens exchanged",
        forward(
            """
answer = whole(query, key, value, kv_cache, metadata, output)
if metadata.from_groups and metadata.num_prefills and metadata.num_decodes:
    own = answer[: metadata.num_tokens]
    own.copy_(own.roll(-metadata.num_prefill_tokens, 0))
return answer
"""
        ),
    ),
    Fault(
        "tables_of_the_list_builder_read_backwards",
        "test_a_windowed_step_of_the_list_builder",
        "; the step is the list builder's (metadata.from_groups)",
        forward(
            """
if metadata.from_groups and metadata.num_decodes:
    whole(query, key, value, kv_cache, metadata, output)
    metadata = changed(metadata, block_table=metadata.host.block_table[:, ::-1].copy())
return whole(query, key, value, kv_cache, metadata, output)
"""
        ),
    ),
    Fault(
        "window_one_wider_in_decodes",
        "test_window_off_by_one",
        "it is as if the window were W + 1",
        forward(
            """
from dataclasses import replace
if self.sliding_window:
    more = not metadata.num_prefills
    self._scoring = replace(self._scoring, sliding_window=self.sliding_window + more)
return whole(query, key, value, kv_cache, metadata, output)
"""
        ),
    ),
    Fault(
        "sinks_of_prompts_only",
        "test_a_feature_over_random_batches[sinks]",
        "it is as if the layer had no sinks",
        forward(
            """
from dataclasses import replace
scoring = self._scoring
if not metadata.num_prefills:
    self._scoring = replace(scoring, sinks=None)
answer = whole(query, key, value, kv_cache, metadata, output)
self._scoring = scoring
return answer
"""
        ),
    ),
    Fault(
        "one_request_alone_is_split_wrong",
        "test_decode",
        "differs from dense",
        forward(
            """
alone = metadata.num_decodes == metadata.num_reqs == 1
return whole(query, key, value, kv_cache, metadata, output).div_(1 + alone)
"""
        ),
    ),
    Fault(
        "views_of_the_first_cache",
        "test_a_layer_that_is_given_another_cache",
        "forward wrote nothing to slot",
        forward(
            """
kv_cache = self.__dict__.setdefault("views", kv_cache)
return whole(query, key, value, kv_cache, metadata, output)
"""
        ),
    ),
    Fault(
        "views_of_the_first_memory",
        "test_a_cache_that_is_given_other_memory",
        "forward wrote nothing to slot",
        forward(
            """
kept = self.__dict__.setdefault("views", (kv_cache, kv_cache.data))
if kept[0] is kv_cache:  # the same object, as if it were the same memory
    kv_cache = kept[1]
return whole(query, key, value, kv_cache, metadata, output)
"""
        ),
    ),
    Fault(
        "last_page_of_a_full_page_is_empty",
        "test_lengths_around_a_block[0]",
        "differs from dense",
        forward(
            """
size, lens = kv_cache.shape[2], metadata.host.seq_lens
if not metadata.num_prefills:
    whole(query, key, value, kv_cache, metadata, output)
    full = (lens % size == 0) & (lens > size)
    metadata = changed(metadata, seq_lens=np.where(full, lens - size, lens).astype(np.int32))
return whole(query, key, value, kv_cache, metadata, output)
"""
        ),
    ),
    Fault(
        "page_after_a_full_last_page",
        "test_nothing_is_read_that_no_request_owns",
        "the output holds NaN",
        forward(
            """
answer = whole(query, key, value, kv_cache, metadata, output)
size, table = kv_cache.shape[2], np.pad(metadata.host.block_table, ((0, 0), (0, 1)))
for row, length in enumerate(metadata.host.seq_lens):
    if length % size == 0:
        answer += 0 * kv_cache[:, int(table[row, length // size])].sum()
return answer
"""
        ),
    ),
    Fault(
        "drafts_one_key_short",
        "test_decodes_of_several_tokens",
        "differs from dense",
        forward(
            """
if metadata.num_decodes and metadata.max_decode_query_len > 1:
    whole(query, key, value, kv_cache, metadata, output)
    metadata = changed(metadata, seq_lens=metadata.host.seq_lens - 1)
return whole(query, key, value, kv_cache, metadata, output)
"""
        ),
    ),
    Fault(
        "drafts_with_the_usual_scale",
        "test_drafts_beside_other_rows[persistent]",
        "it is as if the scale were 1 / sqrt(head_size), not the layer's own, 0.7",
        forward(USUAL_SCALE.format(where="metadata.num_decodes and metadata.max_decode_query_len > 1")),
    ),
    *(
        Fault(
            f"drafts_of_{builder}_steps_see_each_other",
            f"test_drafts_beside_other_rows[{builder}]",
            "differs from dense",
            forward(
                f"""
answer, host = whole(query, key, value, kv_cache, metadata, output), metadata.host
is_adopted = type(metadata.builder).__name__ == "AdoptedSteps"
if metadata.decodes_first and not metadata.use_cuda_graph and is_adopted == {builder == "adopted"}:
    for first, last in zip(host.query_start_loc[: metadata.num_decodes], host.query_start_loc[1:]):
        answer[first:last] = answer[first:last].mean(0)
return answer
"""
            ),
        )
        for builder in ("persistent", "adopted")
    ),
    Fault(
        "an_empty_step_is_an_error",
        "test_captured_sizes_over_changing_batches[1]",
        "it raises inside a captured run of 8 requests: RuntimeError: plan: no work",
        forward(
            """
if not metadata.host.seq_lens.any():
    raise RuntimeError("plan: no work")
return whole(query, key, value, kv_cache, metadata, output)
"""
        ),
    ),
    Fault(
        "plan_without_the_window_in_its_key",
        "test_a_feature_of_the_first_layers_and_not_of_the_last",
        "it is as if its features were those of layer 0",
        forward(
            """
from dataclasses import replace
planned = metadata.kept.setdefault((self.scale, self.logits_soft_cap), self.sliding_window)  # of the first layer
scoring = self._scoring
if planned is not None:  # the plan reads these keys, and the kernel hides some of them
    self._scoring = replace(scoring, sliding_window=min(planned, self.sliding_window or planned))
answer = whole(query, key, value, kv_cache, metadata, output)
self._scoring = scoring
return answer
"""
        ),
    ),
    Fault(
        "plan_kept_on_the_backend",
        "test_steps_of_two_builders_take_turns",
        "differs from dense",
        PLANNED_LENGTHS.format(place="self"),
    ),
    Fault(
        "plan_kept_by_the_builder",
        "test_a_step_is_built_before_the_last_one_runs",
        "differs from dense",
        PLANNED_LENGTHS.format(
            place="vars(self).setdefault('of', {}).setdefault(id(metadata.builder), SimpleNamespace())"
        ),
    ),
    Fault(
        "lengths_on_the_host_taken_for_exact",
        "test_lengths_on_the_host_that_are_upper_bounds",
        "differs from dense",
        facts="host_lengths='bounded'",
    ),
    Fault(
        "a_window_that_begins_by_the_bounds_of_the_host",
        "test_lengths_on_the_host_that_are_upper_bounds[features]",
        "differs from dense",
        "import dataclasses\n"
        + forward("""
known = {name: getattr(metadata, name).numpy() for name in ("seq_lens", "context_lens")}
beyond = int((metadata.host.seq_lens - known["seq_lens"]).max(initial=0))
sound, window = self._scoring, self.sliding_window
if window is not None and beyond > 0:
    self._scoring = dataclasses.replace(sound, sliding_window=max(1, window - beyond))
try:
    return whole(query, key, value, kv_cache, changed(metadata, **known), output)
finally:
    self._scoring = sound
"""),
        "host_lengths='bounded'",
    ),
    Fault(
        "longest_request_taken_for_its_length",
        "test_lengths_that_the_host_does_not_know",
        "differs from dense",
        forward(
            """
from types import SimpleNamespace
host = SimpleNamespace(query_start_loc=metadata.host.query_start_loc, slot_mapping=metadata.host.slot_mapping)
lens = metadata.seq_lens.numpy() if metadata.num_reqs > 1 else np.array([metadata.max_seq_len], np.int32)
given = SimpleNamespace(
    host=host, slot_mapping=metadata.slot_mapping, num_reqs=metadata.num_reqs, from_groups=metadata.from_groups,
    block_table=torch.nn.functional.pad(metadata.block_table, (0, 1000)),
)
host.seq_lens, host.context_lens = lens, lens - np.diff(host.query_start_loc)
return whole(query, key, value, kv_cache, given, output)
"""
        ),
        "host_needs={'query_start_loc', 'slot_mapping'}, host_lengths='none'",
    ),
)
