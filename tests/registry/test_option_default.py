"""What a spec states twice, or that contradicts itself, is refused by the name of the field."""

import pytest

from attncore import BackendSpec, MultipleOf, Option


@pytest.mark.parametrize(("default", "choices"), [(3, (1, 2)), ("x", ())])
def test_a_bad_default_is_called_that(default, choices):
    with pytest.raises(ValueError, match=r"^default: "):
        Option(int, "a number", default, choices)


def test_a_bad_choice_is_called_that():
    with pytest.raises(ValueError, match=r"^choices: 'x' is not an int"):
        Option(int, "a number", None, (1, "x"))


def test_a_layout_stands_once():
    with pytest.raises(ValueError, match="kv_cache_layouts: 'NHD' stands twice"):
        BackendSpec(
            name="acme", api=1, factory="attn_acme:B", devices={"cpu": 5}, dtypes={"float32"}, head_sizes={64},
            block_sizes=MultipleOf(16), kv_cache_layouts=("NHD", "NHD"),
        )  # fmt: skip
