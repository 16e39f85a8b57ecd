"""attncore's ways over the same rows, and the plain-Python and NumPy baselines: in every peer's process."""

import builders
from baselines import Vectorised, plain_python
from shapes import BLOCK_SIZE, Row
from timing import Way

from attncore.builder import InputBatch, MetadataBuilder

CALLS = 64  # steps a turn; each row's blocks have room for as many


def with_room(rows):
    """The rows with blocks for the steps of a turn, ids that no request has."""
    free = max(max(row.blocks) for row in rows) + 1
    roomy = []
    for row in rows:
        missing = (row.computed + row.query_len + CALLS) // BLOCK_SIZE + 1 - len(row.blocks)
        roomy.append(Row(row.blocks + list(range(free, free + max(missing, 0))), row.computed, row.query_len))
        free += max(missing, 0)
    return roomy


def persistent(rows, **options):
    """The builder, what it is called with, and what takes the batch back to where the rows stand."""
    roomy = with_room(rows)
    tokens = sum(row.query_len for row in rows)
    longest = max(len(row.blocks) for row in roomy) * BLOCK_SIZE
    batch = InputBatch(max_num_reqs=len(rows), max_model_len=longest, block_size=BLOCK_SIZE)
    builder = MetadataBuilder(batch, max_num_batched_tokens=tokens, **options)
    for i, row in enumerate(roomy):
        batch.add_request(i, row.blocks, row.computed)

    def reset():
        batch.rollback_many({i: batch.num_computed_tokens(i) - row.computed for i, row in enumerate(rows)})

    return builder, {i: row.query_len for i, row in enumerate(rows) if row.query_len != 1}, reset


def persistent_way(rows, then=None, **options):
    """``then`` is called with each step's metadata."""
    builder, scheduled, reset = persistent(rows, **options)
    build = builder.build
    step = (lambda: build(scheduled)) if then is None else (lambda: then(build(scheduled)))
    return Way(step, CALLS, reset, alone=bool(scheduled))


def list_way(rows, layout="flash"):
    return Way(builders.list_builder(rows, layout), 4)


def baselines(rows):
    numpy = Vectorised(with_room(rows), BLOCK_SIZE, sum(row.query_len for row in rows))
    start = numpy.computed.copy()

    def reset():
        numpy.computed[:] = start

    alone = any(row.query_len != 1 for row in rows)
    return {
        "plain Python": Way(lambda: plain_python(rows, BLOCK_SIZE), 1),
        "NumPy": Way(numpy.step, CALLS, reset, alone=alone),
    }
