"""Faults of bidirectional spans; each names the test of the kit that must find it."""

from testing.faulty_backend import NOT_READ, USUAL_SCALE, Fault, forward

SPANS = "features={'bidirectional_spans', 'sliding_window', 'alibi', 'sinks', 'logits_soft_cap', 'multi_token_decode'}"
SHAPE = "test_spans_of_any_shape"


def ends(change: str) -> str:
    """A layer that reads other ends: ``change`` has ``found``, those of the step, and ``position`` of its tokens."""
    return forward(f"""
found = getattr(metadata.host, "span_ends", None)
if found is None:
    return whole(query, key, value, kv_cache, metadata, output)
found, host = np.array(found), metadata.host
counts = np.diff(host.query_start_loc)
rows = np.repeat(np.arange(len(counts)), counts)
position = host.context_lens[rows] + np.arange(len(rows)) - host.query_start_loc[:-1][rows]
{change}
return whole(query, key, value, kv_cache, changed(metadata, span_ends=found), output)
""")


def attend(body: str) -> str:
    """A layer that masks otherwise: ``body`` has what ``attend`` takes, and may write to ``beside``."""
    lines = "\n".join(f"        {line}" for line in body.strip().splitlines())
    return f"""
from attncore.reference import causal, scoring as own_scoring
def forward(self, *given, **more):
    def attend(query, key, value, query_position, key_position, scoring, on_path=None, beside=None):
        distance = query_position.unsqueeze(2) - key_position.unsqueeze(1)
{lines}
        return own_scoring.attend(query, key, value, query_position, key_position, scoring, on_path, beside)
    causal.attend = attend
    try:
        return super(Impl, self).forward(*given, **more)
    finally:
        causal.attend = own_scoring.attend
Impl.forward = forward
"""


SPAN_FAULTS = (
    Fault(
        "spans_with_the_usual_scale",
        "test_spans_over_random_batches",
        "differs",
        forward(USUAL_SCALE.format(where="np.any(getattr(metadata.host, 'span_ends', None))")),
        SPANS,
    ),
    Fault(
        "span_ends_not_read",
        f"{SHAPE}[one]",
        "; it is as if its tokens were in no span: span_ends was not read",
        ends("found[:] = 0"),
        SPANS,
    ),
    Fault(
        "spans_without_their_last_token",
        f"{SHAPE}[at both ends]",
        "; it is as if the last token of a span were not in it",
        ends("found[found == position + 1] = 0"),
        SPANS,
    ),
    Fault(
        "spans_that_touch_as_one",
        f"{SHAPE}[that touch]",
        "; it is as if spans that touch were one",
        ends("found[found != 0] = found.max()"),
        SPANS,
    ),
    Fault(
        "spans_beside_a_table_alone",
        "test_spans_without_a_cache[one]",
        "; it is as if its tokens were in no span: span_ends was not read",
        ends("if kv_cache is None:\n    found[:] = 0"),
        SPANS,
    ),
    Fault(
        "spans_of_whole_prompts",
        "test_spans_over_random_batches",
        "differs",
        ends("found[found == 0] = -1"),
        SPANS,
    ),
    Fault(
        "spans_of_the_first_chunk_alone",
        "test_spans_in_chunks",
        "; it is as if its tokens were in no span: span_ends was not read",
        ends("found[host.context_lens[rows] > 0] = 0"),
        SPANS,
    ),
    Fault(
        "spans_cut_by_the_window",
        "test_spans_with_a_feature[sliding_window]",
        "; it is as if the window cut the spans: their tokens see each other whatever the window",
        attend("""
if beside is not None and scoring.sliding_window is not None:
    beside &= distance < scoring.sliding_window
"""),
        SPANS,
    ),
    Fault(
        "no_window_for_tokens_of_spans",
        "test_spans_behind_a_window",
        "differs",
        attend("""
if beside is not None and scoring.sliding_window is not None:
    beside |= beside.any(dim=2, keepdim=True) & (distance >= 0)
"""),
        SPANS,
    ),
    Fault(
        "slopes_of_later_keys_with_the_other_sign",
        "test_spans_with_a_feature[alibi]",
        "differs",
        attend("""
if beside is not None and scoring.alibi_slopes is not None:
    class signed(torch.Tensor):
        abs = lambda self: self
    query_position = query_position.as_subclass(signed)
"""),
        SPANS,
    ),
    Fault(
        "decodes_without_spans",
        "test_short_spans_that_count_as_decodes",
        "; it is as if its tokens were in no span: span_ends was not read",
        ends("found[: metadata.num_decode_tokens] = 0"),
        SPANS,
    ),
    Fault(
        "ends_of_the_capture",
        "test_captured_prompts_with_spans",
        "; it is as if its tokens were in no span: span_ends was not read",
        forward("""
kept, found = self.__dict__.setdefault("kept", {}), getattr(metadata.host, "span_ends", None)
if found is None or not metadata.use_cuda_graph:
    return whole(query, key, value, kv_cache, metadata, output)
found = kept.setdefault((metadata.num_reqs, metadata.num_tokens), np.array(found))
return whole(query, key, value, kv_cache, changed(metadata, span_ends=found), output)
"""),
        f"{SPANS}, cuda_graph='always'",
    ),
    Fault(
        "ends_of_the_step_before",
        "test_captured_prompts_with_spans",
        "differs",
        forward("""
found = getattr(metadata.host, "span_ends", None)
if found is None or not metadata.use_cuda_graph:
    return whole(query, key, value, kv_cache, metadata, output)
before = self.__dict__.setdefault("before", {})
size = metadata.num_reqs, metadata.num_tokens
found, before[size] = np.maximum(found, before.get(size, found)), np.array(found)
return whole(query, key, value, kv_cache, changed(metadata, span_ends=found), output)
"""),
        f"{SPANS}, cuda_graph='always'",
    ),
    Fault(
        "keys_of_spans_in_the_same_tile_alone",
        "test_long_spans[None]",
        "differs",
        attend("""
if beside is not None:
    beside &= (query_position // 128).unsqueeze(2) >= (key_position // 128).unsqueeze(1)
"""),
        SPANS,
    ),
    Fault(
        "windows_that_reach_no_further_back_than_a_tile",
        "test_long_spans[100]",
        "differs",
        attend("""
if beside is not None and scoring.sliding_window is not None:
    beside &= distance < scoring.sliding_window + 64
"""),
        SPANS,
    ),
    Fault(
        "spans_not_read_without_writing",
        "test_spans_by_another_method[write=False]",
        "; it is as if its tokens were in no span: span_ends was not read",
        NOT_READ.format(where="not write", name="forward", field="span_ends"),
        SPANS,
    ),
    Fault(
        "spans_not_read_with_the_log_sum_exp",
        "test_spans_by_another_method[forward_with_lse]",
        "; it is as if its tokens were in no span: span_ends was not read",
        NOT_READ.format(where="True", name="forward_with_lse", field="span_ends"),
        "features={'bidirectional_spans', 'lse'}",
    ),
)
