"""Lists that an id's own code empties while they are read: both implementations see the same of them."""

import pytest
from fuzz.lying_objects import Index
from fuzz.outcomes import outcome, plain

from attncore.builder import CommonMetadataBuilder, InputBatch, Sequence, SequenceGroup


def emptied(values, at, lists):
    """Ids, of which one empties ``lists`` when it is read."""
    ids = list(values)
    ids[at] = Index(lambda: [one.clear() for one in lists], values[at])
    return ids


def built(kernels, sequences):
    step = CommonMetadataBuilder(4, kernels=kernels).build([SequenceGroup(False, sequences)])
    return {name: getattr(step.host, name).tolist() for name in ("block_table", "slot_mapping", "seq_lens")}


def of_ids(kernels, at, context_len):
    lists = []
    ids = emptied([5, 6, 7], at, lists)
    lists.append(ids)
    return built(kernels, [Sequence(7, 1, context_len, ids)])


def of_sequences(kernels, at, context_len):
    sequences = []
    sequences += [Sequence(7, 1, context_len, emptied([5, 6, 7], at, [sequences])), Sequence(8, 1, 3, [1, 2, 3])]
    return built(kernels, sequences)


def of_a_request(kernels, at, num_tokens):
    batch, lists = InputBatch(max_num_reqs=2, max_model_len=64, block_size=4, kernels=kernels), []
    ids = emptied([5, 6, 7], at, lists)
    lists.append(ids)
    batch.add_request("a", ids, num_tokens % 64)
    return list(batch.block_ids("a"))


@pytest.mark.parametrize("tokens", [0, 3, 10, 200])
@pytest.mark.parametrize("at", [0, 1, 2])
@pytest.mark.parametrize("door", [of_ids, of_sequences, of_a_request])
def test_both_see_the_same(door, at, tokens):
    found = [outcome(door, kernels, at, tokens) for kernels in ("cython", "numba")]
    assert repr(plain(found[0])) == repr(plain(found[1]))
