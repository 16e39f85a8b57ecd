"""Faults under an option that is not the default; each names the test that must find it."""

from testing.faulty_backend import Fault, forward

OPTIONS = "test_each_value_of_each_option"
LIGHT = "from attncore import Option"
FACTS = (
    "options={'kernel': Option(str, 'which', default='a', choices=('a', 'b', 'c')), "
    "'fast': Option(bool, 'whether', default=False)}"
)


def under(option: str, body: str) -> str:
    """Code that changes a layer's answer where the backend was created with an option (a condition over ``given``)."""
    lines = "\n".join(f"    {line}" for line in body.strip().splitlines())
    return forward(
        f"given = self.backend.config.options\nif {option}:\n{lines}\n"
        "return whole(query, key, value, kv_cache, metadata, output)"
    )


OPTION_FAULTS = (
    Fault(
        "kernel_b_is_wrong",
        OPTIONS,
        "with option kernel=b: the output differs from dense",
        under("given.get('kernel') == 'b'", "return whole(query, key, value, kv_cache, metadata, output).neg_()"),
        FACTS,
        LIGHT,
    ),
    Fault(
        "fast_fails_in_a_graph",
        OPTIONS,
        "with option fast=True: it raises inside a captured run",
        under("given.get('fast') and metadata.use_cuda_graph", "raise RuntimeError('no graph')"),
        FACTS,
        LIGHT,
    ),
    Fault(
        "a_value_that_no_table_has",
        OPTIONS,
        "with option kernel=c: KeyError: 'c'",
        """
def init(self, config):
    {"a": 1, "b": 2}[config.options.get("kernel", "a")]
    super(Backend, self).__init__(config)
Backend.__init__ = init
""",
        FACTS,
        LIGHT,
    ),
    Fault(
        "a_shared_prefix_is_written_without_write",
        OPTIONS,
        "with option fast=True: forward with write=False changed the cache",
        under(
            "given.get('fast') and not write and metadata.num_reqs > 8",
            "kv_cache[0, 0, 0] += 1",
        ),
        FACTS,
        LIGHT,
    ),
    Fault(
        "a_bound_in_check_alone",
        "test_values_that_check_refuses_are_refused_by_create",
        "option splits=-1: check refuses it (splits below 1 make no part), and Choice.create(options=...) takes it",
        "",
        "options={'splits': Option(int, 'how many', default=4)}, check=check",
        """
from attncore import Option

def check(request, host):
    if request.options.get("a_bound_in_check_alone", {}).get("splits", 4) < 1:
        yield "splits below 1 make no part"
""",
    ),
)
