"""Environment variables: each checked where it is read, by its name."""

import pytest

from attncore import env


@pytest.mark.parametrize(
    ("variable", "value", "read"),
    [
        ("ATTNCORE_BACKEND", "Flash Attention", env.backend),
        ("ATTNCORE_PLUGINS", "flash,,No Name", env.plugins),
        ("ATTNCORE_DISABLE_PLUGINS", "1", env.disabled_plugins),
        ("ATTNCORE_STRICT_PLUGINS", "yes", env.strict_plugins),
        ("ATTNCORE_KERNELS", "rust", env.kernels),
        ("ATTNCORE_POISON", "true", env.poison),
        ("ATTNCORE_REQUIRE_EXT", "2", env.require_ext),
        ("ATTNCORE_DEBUG_EXT", "on", env.debug_ext),
    ],
)
def test_a_bad_value_names_the_variable(monkeypatch, variable, value, read):
    monkeypatch.setenv(variable, value)
    with pytest.raises(ValueError) as caught:
        read()
    assert str(caught.value).startswith(f"{variable}: ")
    assert env.problems()[variable] == str(caught.value)


def test_unset_is_not_empty(monkeypatch):
    for variable in env.VARIABLES:
        monkeypatch.delenv(variable, raising=False)
    assert (env.backend(), env.plugins(), env.kernels()) == (None, None, None)
    assert (env.disabled_plugins(), env.strict_plugins(), env.poison()) == (frozenset(), False, False)
    monkeypatch.setenv("ATTNCORE_PLUGINS", "")
    assert env.plugins() == frozenset()
    monkeypatch.setenv("ATTNCORE_KERNELS", "")
    assert env.kernels() is None


def test_good_values(monkeypatch):
    monkeypatch.setenv("ATTNCORE_PLUGINS", "flash, acme-attn ,")
    monkeypatch.setenv("ATTNCORE_KERNELS", "numba")
    monkeypatch.setenv("ATTNCORE_POISON", "1")
    assert env.plugins() == {"flash", "acme-attn"}
    assert (env.kernels(), env.poison()) == ("numba", True)


def test_unknown_variables_are_found_and_guessed(monkeypatch):
    monkeypatch.setenv("ATTNCORE_PLUGIN", "flash")
    assert env.problems()["ATTNCORE_PLUGIN"].endswith("did you mean ATTNCORE_PLUGINS?")
