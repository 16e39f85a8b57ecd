"""Batches and builders whose sizes are objects that lie: refused, or a batch of one size all the way through."""

from fuzz.budget import examples
from fuzz.hostile import integers, mostly, objects
from fuzz.outcomes import outcome, plain
from hypothesis import given
from hypothesis import strategies as st

from attncore.builder import ContextParallel, InputBatch, KVCacheGroup, MetadataBuilder
from attncore.builder.fields import FIELDS


def size(*usual):
    return st.sampled_from(usual).map(lambda value: lambda: value) | integers


batches = st.fixed_dictionaries(
    {"max_num_reqs": size(1, 4), "max_model_len": size(16, 24)},
    optional={"block_size": size(1, 4), "num_blocks": size(60), "max_encoder_len": size(8)},
)
groups = st.none() | st.lists(
    st.fixed_dictionaries(
        {"name": mostly(st.sampled_from(["a", "b"]), objects), "block_size": size(4, 8)},
        optional={
            "num_blocks": size(60), "sliding_window": size(5), "kernel_block_size": size(2, 4),
            "cross": mostly(st.booleans(), integers),
        },
    ),
    max_size=2,
)  # fmt: skip
builders = st.fixed_dictionaries(
    {"max_num_batched_tokens": size(16, 64)},
    optional={
        "max_num_encoder_tokens": size(8), "decode_threshold": size(1, 3), "depth": size(1, 2),
        "ticket": mostly(st.just(False), integers), "transport": mostly(st.just("auto"), objects),
    },
)  # fmt: skip
ranks = st.none() | st.fixed_dictionaries(
    {"world_size": size(1, 2), "rank": size(0, 1), "block_size": size(2, 4), "interleave": size(1, 2)}
)


def made(drawn):
    return {name: value() for name, value in drawn.items()}


def lifetime(kernels, batch, groups, builder, ranks):
    """A batch is made, filled and built from: the outcome of each call in turn."""
    own = made(batch)
    if groups is not None:
        own = {**own, "groups": [KVCacheGroup(**made(group)) for group in groups]}
    else:
        own.setdefault("block_size", 4)
    found = [outcome(InputBatch, kernels=kernels, **own)]
    if found[0][0] != "answer":
        return found
    batch, found = found[0][1], []
    more = made(builder)
    if ranks is not None:
        made_ranks = outcome(ContextParallel, **made(ranks))
        if made_ranks[0] != "answer":
            return [made_ranks]
        more["context_parallel"] = made_ranks[1]
    builder = outcome(MetadataBuilder, batch, **more)
    for number in range(5):
        ids = [3 * number + k for k in range(1, 4)]
        given_ids = ids if groups is None else {str(group.name): ids for group in batch.groups}
        found.append(outcome(batch.add_request, f"r{number}", given_ids, number))
    for name in ("release_passed_blocks", "needs_block"):
        found.append(outcome(getattr(batch, name)))
    if builder[0] == "answer":
        for arguments in ({}, {"scheduled": {"r1": 3}}, {"query_len": 2}):
            step = outcome(builder[1].build, **arguments)
            found.append(fields(step[1]) if step[0] == "answer" else step)
        size = outcome(builder[1].capture, 1)
        found.append(size if size[0] != "answer" else fields(outcome(builder[1].build_empty, 1)[1]))
    else:
        found.append(builder)
    for number in range(5):
        found.append(outcome(batch.remove_request, f"r{number}"))
    return found


def fields(metadata):
    return {name: plain(getattr(metadata.host, name, None)) for name in FIELDS}


@examples(250)
@given(batch=batches, groups=groups, builder=builders, ranks=ranks)
def test_sizes(batch, groups, builder, ranks):
    left, right = (lifetime(kernels, batch, groups, builder, ranks) for kernels in ("cython", "numba"))
    assert repr(plain(left)) == repr(plain(right))
