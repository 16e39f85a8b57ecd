"""The kit on backends of other kinds: everything declared, latent attention alone, encoders through page lists."""

import pytest
from planting import Site
from testing.faulty_backend import HEAVY, LIGHT, forward

from attncore.errors import NoBackendError
from attncore.registry.choice.select import select
from attncore.testing.harness.run_suite import conformance
from attncore.testing.verify_child import compared

QUIET = ("-p", "no:terminal")
OF_THEIR_OWN_ROWS = "not captured and not every_method and not results and not strided"
"""Leaves out what these kinds have in rows of other things."""
EVERYTHING = (
    "features={'sliding_window', 'logits_soft_cap', 'alibi', 'sinks', 'encoder', 'encoder_decoder', 'lse', "
    "'multi_token_decode'}, use_mla=True, head_size_v=MultipleOf(4)"
)
LATENT_ONLY = "head_sizes={24, 40}, head_size_v={16}, use_mla=True, mla_only=True, max_group_size=16"


def plant(site: Site, name: str, facts: str, code: str = "") -> None:
    site.plugin(name, LIGHT.format(name=name, facts=f"dict({facts})"), heavy=HEAVY + code)


def states(report):
    return {row["capability"]: row["state"] for row in report.rows()}


def test_a_backend_that_declares_everything_passes(site):
    plant(site, "everything", EVERYTHING)
    code, report = conformance("everything", settings="EXAMPLES = 8\n", options=QUIET)
    assert (code, report.failures) == (0, [])
    found = states(report)
    for row in ("encoder", "encoder_decoder", "lse", "latent attention", "value head size"):
        assert found[row] == "supported"


@pytest.mark.parametrize("most", [1, 2])
def test_a_latent_backend_of_few_heads_passes_with_values_for_each_head(site, most):
    """Slopes and sinks are of as many heads as a latent cache, which has one head of keys, leaves to the backend."""
    facts = LATENT_ONLY.replace("max_group_size=16", f"max_group_size={most}")
    plant(site, "few", f"{facts}, features={{'alibi', 'alibi_standard', 'sinks', 'sliding_window'}}")
    asked = "(alibi or sinks or feature) and not captured"
    code, report = conformance("few", settings="EXAMPLES = 2\n", options=(*QUIET, "-k", asked))
    assert (code, report.failures) == (0, [])
    found = states(report)
    for row in ("alibi", "alibi_standard", "sinks", "sinks set later", "features together"):
        assert found[row] == "supported"


def test_what_is_not_declared_is_unsupported(site):
    plant(site, "plain", "features=set(), unsupported={'lse': 'the kernel keeps it to itself'}")
    asked = f"(encoder or cross or log_sum_exp or latent or value_head) and not without and {OF_THEIR_OWN_ROWS}"
    code, report = conformance("plain", options=(*QUIET, "-k", asked))
    rows = {row["capability"]: row for row in report.rows()}
    assert code == 0
    reasons = {name: row["reason"] for name, row in rows.items() if row["state"] == "unsupported"}
    assert reasons == {
        "encoder": "its spec does not declare it",
        "encoder_decoder": "its spec does not declare it",
        "lse": "the kernel keeps it to itself",
        "latent attention": "its spec does not declare use_mla",
        "value head size": "its spec says that it is the query's",
    }


FAILING = "check=lambda request, host: 1 // 0"
VARIANTS = "variants=({})) if (Variant := __import__('attncore').Variant) else dict("
OF_FIRST_VARIANT = VARIANTS.format(f"Variant('a', {FAILING}), Variant('b')")
OF_VARIANT_OF_THIS_DEVICE = VARIANTS.format(f"Variant('a', devices={{'cuda': 1}}), Variant('b', {FAILING})")
OF_VARIANT_OF_ANOTHER = VARIANTS.format(f"Variant('a', devices={{'cuda': 1}}, {FAILING}), Variant('b')")


@pytest.mark.parametrize(
    ("facts", "failed", "error"),
    [
        ("check=lambda request, host: 1 // 0", "decode", "ZeroDivisionError"),
        ("check=lambda request, host: 1 // (request.dtype == 'float32') * []", "dtype bfloat16", "ZeroDivisionError"),
        (OF_FIRST_VARIANT, "decode", "ZeroDivisionError"),
        (OF_VARIANT_OF_THIS_DEVICE, "decode", "ZeroDivisionError"),
        ("check=lambda request, host: [7]", "decode", "it yields a int"),
    ],
    ids=["always", "of a dtype", "of a variant that is passed over", "of the variant of this device", "no sentence"],
)
def test_a_check_that_fails_refuses_nothing(site, facts, failed, error):
    plant(site, "careless", facts)
    code, report = conformance("careless", options=(*QUIET, "-k", "test_decode or test_dtype or test_prefill"))
    rows = {row["capability"]: row for row in report.rows()}
    assert (code, rows[failed]["state"]) == (1, "failed")
    assert rows[failed]["reason"].startswith("the check of attn-careless 1.0 failed: ")
    assert error in rows[failed]["reason"]


@pytest.mark.parametrize(
    ("facts", "state"),
    [(f"{FAILING}, requires=('no-such-distribution>=1',)", "unsupported"), (OF_VARIANT_OF_ANOTHER, "supported")],
    ids=["distribution", "device"],
)
def test_a_check_may_fail_where_what_it_counts_on_is_missing(site, facts, state):
    plant(site, "careless", facts)
    code, report = conformance("careless", options=(*QUIET, "-k", "test_decode"))
    assert (code, {row["state"] for row in report.rows()}) == (0, {state})


@pytest.mark.parametrize(
    "facts",
    [
        "head_sizes={96}",
        "head_sizes={192}",
        "head_sizes={576}, head_size_v={512}, use_mla=True, mla_only=True, block_sizes={64}",
    ],
    ids=["96", "192", "latent rows of 576"],
)
def test_large_heads_alone_are_as_exact_as_float32_is(site, facts):
    plant(site, "large", f"dtypes={{'float32'}}, {facts}")
    asked = "exponential or test_scale or different_scales or feature_of_the_first"
    code, report = conformance("large", options=(*QUIET, "-k", asked))
    assert (code, report.failures) == (0, [])


def test_latent_attention_alone_passes(site):
    plant(site, "latent", LATENT_ONLY)
    code, report = conformance("latent", settings="EXAMPLES = 8\n", options=QUIET)
    assert (code, report.failures) == (0, [])
    found = states(report)
    for row in ("latent attention", "decode", "mixed batches", "NaN canary", "strided tensors", "declared head sizes"):
        assert found[row] == "supported"
    assert found["value head size"] == "unsupported"


@pytest.mark.parametrize(
    "facts",
    ["head_sizes=MultipleOf(8), mla_only=True", "head_sizes={16, 48}"],
    ids=["latent rows alone", "latent rows beside others"],
)
def test_latent_rows_are_as_large_as_their_values(site, facts):
    """Also where a smaller size is declared, which holds none."""
    plant(site, "wide", f"{facts}, head_size_v={{40}}, use_mla=True, block_sizes=MultipleOf(1), cuda_graph='never'")
    asked = "test_latent_attention_over_random or test_latent_blocks or test_decode"
    code, report = conformance("wide", settings="EXAMPLES = 4\n", options=(*QUIET, "-k", asked))
    assert (code, report.failures) == (0, [])
    assert states(report)["latent attention"] == "supported"
    assert states(report)["decode"] == "supported"


READS_THE_DEVICE = forward("""
lengths = {name: getattr(metadata, name).numpy() for name in ("seq_lens", "context_lens")}
return whole(query, key, value, kv_cache, changed(metadata, **lengths), output)
""")


def test_blocks_of_one_token_and_bounds_of_lengths(site):
    plant(site, "single", "block_sizes={1, 2}, host_lengths='bounded', cuda_graph='never'", READS_THE_DEVICE)
    code, report = conformance("single", options=(*QUIET, "-k", "upper_bounds"))
    assert (code, report.failures, states(report)) == (0, [], {"host lengths": "supported"})


HEADS_OR_ROWS = (
    "features={'lse'}, cuda_graph='never', variants=(Variant('heads'), Variant('rows', use_mla=True, mla_only=True, "
    "head_sizes={24}, head_size_v={16}, max_group_size=16))"
)
WRITES_PADDING = """
def forward(self, query, key, value, kv_cache, metadata, output=None, *, write=True):
    if self.backend.config.use_mla and write:
        metadata = changed(metadata, slot_mapping=np.maximum(metadata.host.slot_mapping, 0))
    return ReferenceImpl.forward(self, query, key, value, kv_cache, metadata, output, write=write)

Impl.forward = forward
"""


def plant_variants(site, name, code=""):
    light = LIGHT.replace("MultipleOf, hookimpl", "MultipleOf, Variant, hookimpl")
    site.plugin(name, light.format(name=name, facts=f"dict({HEADS_OR_ROWS})"), heavy=HEAVY + code)


def test_latent_rows_are_of_the_variant_that_declares_them(site):
    plant_variants(site, "kinds")
    _, report = conformance(
        "kinds", settings="EXAMPLES = 4\n", options=(*QUIET, "-k", f"latent and {OF_THEIR_OWN_ROWS}")
    )
    assert states(report) == {"latent attention": "supported"}
    _, report = conformance(
        "kinds",
        settings="USE_MLA = True\nEXAMPLES = 4\n",
        options=(*QUIET, "-k", "test_decode and not several or sizes_of_a_value_head"),
    )
    assert report.title == "kinds over latent caches"
    assert states(report) == {"decode": "supported", "value head size": "unsupported"}


def test_a_latent_variant_that_writes_padding_is_found(site):
    plant_variants(site, "kinds", WRITES_PADDING)
    _, report = conformance("kinds", options=(*QUIET, "-k", "latent_padding or test_padded_tokens"))
    assert states(report) == {"padding": "supported", "latent attention": "failed"}


def test_latent_backends_are_compared_with_the_reference(site):
    plant(site, "latent", LATENT_ONLY)
    asked = {"num_heads": 8, "num_kv_heads": 1, "head_size": 40, "head_size_v": 16, "use_mla": True, "dtype": "float32"}
    found = compared(select(backend="latent", **asked).create(), asked)
    assert (found["state"], found["message"]) == ("agrees", "")
    assert found["against"] == "reference and dense float32 attention"
    assert found["steps"] > 3


def test_only_latent_attention_is_chosen_for_it(site):
    plant(site, "latent", LATENT_ONLY)
    with pytest.raises(NoBackendError, match=r"plain heads not supported by attn-latent 1\.0; supported: latent"):
        select(backend="latent", num_heads=8, num_kv_heads=1, head_size=40, dtype="float32")


PAGES = """
def forward(self, query, key, value, kv_cache, metadata, output=None, *, write=True):
    if self.attn_type == "encoder_decoder":
        starts = metadata.host.paged_kv_indptr
        table = np.zeros((len(starts) - 1, max(np.diff(starts).max(), 1)), np.int32)
        for row in range(len(table)):
            pages = metadata.host.paged_kv_indices[starts[row] : starts[row + 1]]
            table[row, : len(pages)] = pages
        metadata = changed(metadata, cross_block_table=table)
    return super(Impl, self).forward(query, key, value, kv_cache, metadata, output, write=write)
Impl.forward = forward
"""


def test_cross_attention_through_page_lists(site):
    plant(site, "pages", "features={'encoder_decoder'}, host_needs=ARRAYS, device_needs=ARRAYS", PAGES)
    code, report = conformance("pages", settings="EXAMPLES = 8\n", options=(*QUIET, "-k", "cross"))
    assert (code, report.failures) == (0, [])
    assert states(report)["encoder_decoder"] == "supported"
    outcomes = {result.test: result.outcome for result in report.results}
    assert outcomes["test_cross_attention_of_the_persistent_builder"] == "passed"
    assert outcomes["test_cross_attention_of_the_list_builder"] == "skipped"


ONE_HEAD_EACH = (
    "max_group_size=1, kv_cache_dtypes={'auto', 'fp8_e4m3'}, features={'alibi', 'sinks', 'sliding_window', "
    "'logits_soft_cap', 'kv_scales', 'encoder_decoder', 'lse', 'tree_mask', 'multi_token_decode'}"
)
NO_SINKS_ACROSS = """
def init(self, backend, layer_name, **features):
    if "attn_type" in features:
        features["sinks"] = None
    super(Impl, self).__init__(backend, layer_name, **features)
Impl.__init__ = init
"""
OF_FEATURES = "feature or scales or together or slopes or sinks or cross"


def test_features_are_tried_where_every_head_has_keys_of_its_own(site):
    plant(site, "mha", ONE_HEAD_EACH)
    code, report = conformance("mha", settings="EXAMPLES = 2\n", options=(*QUIET, "-k", OF_FEATURES))
    assert (code, report.failures) == (0, [])
    found = states(report)
    rows = ("alibi", "sinks", "features together", "layers together", "encoder_decoder", "kv_scales", "tree_mask")
    assert {name: found[name] for name in rows} == dict.fromkeys(rows, "supported")


def test_a_feature_that_is_left_out_there_is_found(site):
    plant(site, "mha", ONE_HEAD_EACH, NO_SINKS_ACROSS)
    code, _ = conformance("mha", settings="EXAMPLES = 2\n", options=(*QUIET, "-k", "cross_attention_with_a_feature"))
    assert code == 1


NO_WINDOW_OVER_FP8 = """
def init(self, backend, layer_name, **features):
    super(Impl, self).__init__(backend, layer_name, **features)
    if features.get("sliding_window") and backend.config.kv_cache_dtype.startswith("fp8"):
        raise {error}("sliding_window: not over an fp8 cache, for which the kernel has none")
Impl.__init__ = init
"""
CHECK = (
    "check=lambda request, host: {answer} if 'sliding_window' in request.asked_features "
    "and request.kv_cache_dtype.startswith('fp8') else []"
)
REFUSES, FAILS = CHECK.format(answer="['no window over an fp8 cache']"), CHECK.format(answer="1 // 0")
CACHES = "kv_cache_dtypes={'auto', 'fp8_e4m3'}, "
OVER_FP8 = f"{REFUSES}, {CACHES}"
PAIR = "every_method_over_a_cache_dtype or captured_sizes_over_a_cache_dtype"


def test_what_check_refuses_of_a_layer_is_unsupported(site):
    plant(
        site,
        "pair",
        OVER_FP8 + "features={'sliding_window', 'logits_soft_cap'}",
        NO_WINDOW_OVER_FP8.format(error="ValueError"),
    )
    code, report = conformance(
        "pair", settings="EXAMPLES = 2\n", options=(*QUIET, "-k", f"{PAIR} or captured or dtype")
    )
    assert (code, report.failures) == (0, [])
    rows = {row["capability"]: row for row in report.rows()}
    assert rows["captured sizes"]["state"] == "supported"


@pytest.mark.parametrize(
    "variants",
    [f"Variant('a', devices={{'cuda': 1}}), Variant('b', {REFUSES})", f"Variant('a', {REFUSES}), Variant('b')"],
    ids=["beside one of another device", "before one that has them"],
)
def test_what_the_check_of_a_variant_refuses_of_a_layer_is_unsupported(site, variants):
    facts = f"{CACHES}features={{'sliding_window'}}, {VARIANTS.format(variants)}"
    plant(site, "pair", facts, NO_WINDOW_OVER_FP8.format(error="ValueError"))
    code, report = conformance("pair", settings="EXAMPLES = 2\n", options=(*QUIET, "-k", PAIR))
    assert (code, report.failures) == (0, [])


def test_a_check_that_fails_refuses_no_layer(site):
    facts = f"{FAILS}, {CACHES}features={{'sliding_window'}}"
    plant(site, "pair", facts, NO_WINDOW_OVER_FP8.format(error="ValueError"))
    code, report = conformance("pair", settings="EXAMPLES = 2\n", options=(*QUIET, "-k", PAIR))
    assert code == 1
    assert "the check of attn-pair 1.0 failed" in str(report.failures)


@pytest.mark.parametrize(
    ("facts", "error"),
    [(CACHES, "ValueError"), (OVER_FP8, "RuntimeError")],
    ids=["check refuses nothing", "another error"],
)
def test_what_check_does_not_refuse_of_a_layer_is_a_failure(site, facts, error):
    plant(site, "pair", facts + "features={'sliding_window'}", NO_WINDOW_OVER_FP8.format(error=error))
    code, report = conformance("pair", settings="EXAMPLES = 2\n", options=(*QUIET, "-k", PAIR))
    assert code == 1
    assert "sliding_window: not over an fp8 cache" in str(report.failures)


SHORT = """
def bounded(method):
    def attend(self, query, key, value, kv_cache, metadata, output=None, *, write=True):
        lengths = [metadata.host.seq_lens, getattr(metadata.host, "encoder_seq_lens", None)]
        if max((max(some) for some in lengths if some is not None and len(some)), default=0) > {most}:
            raise RuntimeError("the kernel has no room for longer rows")
        return method(self, query, key, value, kv_cache, metadata, output, write=write)
    return attend

Impl.forward, Impl.forward_with_lse = bounded(ReferenceImpl.forward), bounded(ReferenceImpl.forward_with_lse)
"""


def test_no_request_is_longer_than_the_spec_allows(site):
    plant(site, "short", "max_model_len=512, features={'lse', 'sinks'}", SHORT.format(most=512))
    asked = "decode or long_contexts or changing_lengths or in_a_dtype"
    code, report = conformance("short", settings="EXAMPLES = 4\n", options=(*QUIET, "-k", asked))
    assert (code, report.failures) == (0, [])
    assert states(report)["decode"] == "supported"
    rows = {row["capability"]: row for row in report.rows()}
    assert rows["long contexts"]["reason"].startswith("its spec says max_model_len=512, and this test has a request of")


def test_no_cache_has_more_blocks_than_the_spec_allows(site):
    """A kernel that keeps block ids in a byte was handed 261 blocks."""
    plant(site, "bytes", "max_block_id=255, block_sizes={1}")
    asked = "many_requests or long_contexts[None] or decode_only or test_decode"
    code, report = conformance("bytes", settings="EXAMPLES = 2\n", options=(*QUIET, "-k", asked))
    assert (code, report.failures) == (0, [])
    rows = {row["capability"]: row for row in report.rows()}
    assert rows["many requests"]["reason"].startswith("its spec says max_block_id=255, and this takes")
    assert rows["decode"]["state"] == "supported"


def test_no_encoder_has_more_tokens_than_the_spec_allows(site):
    plant(site, "short", "max_model_len=100, features={'lse', 'encoder', 'encoder_decoder'}", SHORT.format(most=100))
    code, report = conformance("short", settings="EXAMPLES = 2\n", options=(*QUIET, "-k", "encoder or cross"))
    assert (code, report.failures) == (0, [])
    assert {name: states(report)[name] for name in ("encoder", "encoder_decoder")} == dict.fromkeys(
        ("encoder", "encoder_decoder"), "supported"
    )


LARGE = (
    "max_model_len=1024, block_sizes={16, 512}, head_size_v=MultipleOf(8), features={'strided_kv_cache'}, "
    "kv_cache_dtypes={'auto', 'fp8_e4m3'}"
)
OF_LARGE_BLOCKS = "block_sizes or head_sizes or (pair_of_views and not copied) or as_bytes or of_a_value_head"


def test_blocks_may_be_large_beside_the_longest_request(site):
    """Three blocks of 512 are longer than 1024 tokens: requests of fewer are run with them."""
    plant(site, "large", LARGE)
    code, report = conformance("large", settings="EXAMPLES = 2\n", options=(*QUIET, "-k", OF_LARGE_BLOCKS))
    assert (code, report.failures) == (0, [])
    assert states(report)["declared block sizes"] == "supported"


@pytest.mark.parametrize("facts", ["max_model_len=40", "max_model_len=40, block_sizes={512}"])
def test_short_requests_alone_are_right_with_every_size(site, facts):
    features = "features={'strided_kv_cache'}, kv_cache_dtypes={'auto', 'fp8_e4m3'}, head_size_v=MultipleOf(8)"
    plant(site, "brief", f"{facts}, {features}")
    code, report = conformance("brief", settings="EXAMPLES = 2\n", options=(*QUIET, "-k", OF_LARGE_BLOCKS))
    assert (code, report.failures) == (0, [])


OF_FEW_TOKENS = "end_of_the_pool or side_by_side or padded_tokens or order_of_an_engine or captured_sizes_over_changing"


def test_spans_have_room_in_blocks_of_few_tokens(site):
    plant(site, "small", "block_sizes={1}, features={'bidirectional_spans', 'sliding_window', 'lse'}")
    code, report = conformance("small", settings="EXAMPLES = 2\n", options=(*QUIET, "-k", "spans and not captured"))
    assert (code, report.failures) == (0, [])


@pytest.mark.parametrize(
    ("size", "tests"),
    [(1, OF_FEW_TOKENS), *(pytest.param(size, "test", marks=pytest.mark.slow) for size in (1, 2))],
)
def test_blocks_of_few_tokens_have_room(site, size, tests):
    plant(site, "small", f"block_sizes={{{size}}}, cuda_graph='always', pad_seq_len=1")
    code, report = conformance("small", settings="EXAMPLES = 4\n", options=(*QUIET, "-k", tests))
    assert (code, report.failures) == (0, [])
