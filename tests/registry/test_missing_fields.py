"""What a request must state is told at once."""

import pytest

import attncore


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({}, "num_heads: a request must state it, and num_kv_heads, head_size, dtype"),
        ({"num_heads": 4, "dtype": "float16"}, "num_kv_heads: a request must state it, and head_size"),
        ({"num_heads": 4, "num_kv_heads": 4, "head_size": 64}, "dtype: a request must state it"),
    ],
)
def test_every_missing_field_is_named(given, text):
    with pytest.raises(TypeError) as caught:
        attncore.select(**given)
    assert str(caught.value) == text
