"""What the kit says names what the step had, and nothing that it had not."""

import functools

import pytest
from testing.faulty_backend import forward
from testing.lse_faults import LSE, with_lse
from testing.test_planted_faults import plant_in, run

SLOTS = "a slot of -1, or a token of padding, writes nothing"
BESIDE = """
answer = whole(query, key, value, kv_cache, metadata, output)
if metadata.num_reqs == {rows} and not metadata.num_prefills:
    kv_cache[:, -1] += 1
return answer
"""
OFF = "answer, lse = whole(query, key, value, kv_cache, metadata, output)\nreturn answer, lse + {off}"


@pytest.fixture
def plant(site):
    return functools.partial(plant_in, site)


def reason(name, test):
    code, report = run(name, test)
    assert code == 1
    return report.failures[0].reason


def test_padding_is_named_where_a_step_has_some_alone(plant):
    plant("beside", forward(BESIDE.format(rows=6)))
    said = reason("beside", "test_a_smaller_batch_after_a_larger_one")
    assert "which is not in slot_mapping" in said
    assert SLOTS not in said
    plant("beside_padded", forward(BESIDE.format(rows=1)))
    assert f"which is not in slot_mapping: {SLOTS}" in reason("beside_padded", "test_padded_tokens_change_no_block[1]")


def test_a_sink_is_named_where_the_layer_has_some(plant):
    plant("off", with_lse(OFF.format(off=0.5)), LSE)
    assert "(natural), for token 0" in reason("off", "test_log_sum_exp_over_random_batches")
    plant("sunk", with_lse(OFF.format(off="0.5 * (self.sinks is not None)")), LSE)
    assert "(natural, a sink included), for token 0" in reason("sunk", "test_log_sum_exp_with_features")
