"""The dtype of a replay's layers: what the backend that is named computes in."""

from types import SimpleNamespace

import pytest

from attncore.replay.layers import make_layers as layers


@pytest.mark.parametrize(
    ("dtypes", "expected"),
    [
        (({"float32", "bfloat16"},), "float32"),
        (({"float16", "bfloat16"},), "bfloat16"),
        (({"float16"},), "float16"),
        (({"float16"}, {"bfloat16"}), "bfloat16"),
    ],
)
def test_a_named_backend_s_dtype(monkeypatch, dtypes, expected):
    forms = tuple((str(index), SimpleNamespace(dtypes=some)) for index, some in enumerate(dtypes))
    records = [
        SimpleNamespace(name="other", spec=SimpleNamespace(by_variant=())),
        SimpleNamespace(name="gpu", spec=None),
        SimpleNamespace(name="gpu", spec=SimpleNamespace(by_variant=forms)),
    ]
    monkeypatch.setattr(layers, "registry", lambda: SimpleNamespace(records=records))
    assert layers.dtype_of("gpu") == expected
    assert layers.dtype_of(None) == layers.dtype_of("unknown") == "float32"
