"""The compiled kernels: slots, lengths, prefix sums, tables and page lists of one step.

The persistent builder has BatchState (the requests in flight) with a TableState for each KV-cache group (their blocks),
StepArena (the outputs of one step), StepShape (a size of step), StepKernel (checks, then fills a step in one pass over
the rows), StepSender (the journal for a device), SentSteps (a step from names to header in one call) and SentAhead (the
same for steps ahead). The list builder has GroupReader, which reads lists of block ids.
Every buffer is acquired once, at construction. The loops are ``noexcept nogil`` C, called with the GIL held: giving it
up costs up to the switch interval when another thread is busy.

Nothing here writes an error's text: a check returns a code and indices, a bad object "bad", and the refusals of the
builders say what is wrong.

This is one extension module, and one C file, so that every function can be inlined; its topics are the files below, in
kernels/cython. kernels/numba has the same topics, functions and classes. attncore/_slots.pyi has the types.
"""

include "kernels/cython/types.pxi"
include "kernels/cython/codes.pxi"
include "kernels/cython/slots.pxi"
include "kernels/cython/block_ids.pxi"
include "kernels/cython/entrance.pxi"
include "kernels/cython/read_only.pxi"
include "kernels/cython/block_table.pxi"
include "kernels/cython/batch.pxi"
include "kernels/cython/appended_blocks.pxi"
include "kernels/cython/rolled_back.pxi"
include "kernels/cython/arrange.pxi"
include "kernels/cython/columns.pxi"
include "kernels/cython/step_arena.pxi"
include "kernels/cython/step_shape.pxi"
include "kernels/cython/checks.pxi"
include "kernels/cython/one_token_rows.pxi"
include "kernels/cython/varlen_rows.pxi"
include "kernels/cython/encoders.pxi"
include "kernels/cython/context_parallel.pxi"
include "kernels/cython/padding.pxi"
include "kernels/cython/step_sender.pxi"
include "kernels/cython/step.pxi"
include "kernels/cython/sent_steps.pxi"
include "kernels/cython/sent_ahead.pxi"
include "kernels/cython/adopted_rows.pxi"
include "kernels/cython/dlpack_tensors.pxi"
include "kernels/cython/known_steps.pxi"
include "kernels/cython/sequence_checks.pxi"
include "kernels/cython/sequence_fields.pxi"
include "kernels/cython/sequence_groups.pxi"
include "kernels/cython/field_functions.pxi"
include "kernels/cython/sequence_slots.pxi"

IMPLEMENTATION = "cython"
READS_INTS = (<bytes> ATTNCORE_READS_INTS).decode()
