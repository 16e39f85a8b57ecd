"""Requirements of plugins: which are read, which count here, and what passes them."""

import pytest
from lookalikes import PACKAGES, record

from attncore import BackendSpec, Host, MultipleOf
from attncore.registry.choice.reasons_against import reasons_against
from attncore.registry.package_requirements import canonical_name, installed, needed, parse, satisfied
from attncore.registry.request import AttentionRequest


@pytest.mark.parametrize(
    ("text", "version", "fits"),
    [
        ("flash-attn>=2.8,<3", "2.8.3.post2", True),
        ("flash-attn>=2.8,<3", "3.0.0b1", False),
        ("flash-attn-4>=4.0.0b30", "4.0.0b36", True),
        ("flash-attn~=2.8.3.post1", "2.8.3.post2", True),
        ("flash-attn~=2.8.3.post1", "2.8.3", False),
        ("flash-attn~=2.8.3.post1", "2.9", False),
        ("torch>=2.7", "2.13.0+cpu", True),
        ("torch==2.13.0+cpu", "2.13.0+cpu", True),
        ("torch==2.13.0+cpu", "2.13.0+cu130", False),
        ("torch==1!2.*", "2.5", False),
        ("torch", "anything at all", True),
        ("torch>=2.7", "anything at all", False),
        ("torch[opt]>=2.6", "2.7", True),
    ],
)
def test_versions_met_in_practice(text, version, fits):
    assert satisfied(text, version) is fits


@pytest.mark.parametrize("text", ["", "acme 2", "acme>=", "acme>=x", "acme~=2", "acme>=2.*", "acme; python>'3'", 3])
def test_what_is_no_requirement(text):
    with pytest.raises(ValueError, match="is not a requirement"):
        parse(text)


def test_a_name_is_the_same_however_it_is_written():
    assert parse("Acme.Kernels_x>=2").name == canonical_name("acme-kernels.X") == "acme-kernels-x"


def test_a_requirement_of_another_environment_does_not_count():
    texts = ("torch>=2", "here>=1; python_version >= '3'", "elsewhere>=1; python_version < '3'")
    assert needed(texts) == [*texts[:2]]
    spec = BackendSpec(
        name="one", api=1, factory="one:B", devices={"any": 1}, dtypes={"bfloat16"}, head_sizes={64},
        block_sizes=MultipleOf(16), requires=(*texts, "late[fast]>=1"),
    )  # fmt: skip
    request = AttentionRequest(num_heads=1, num_kv_heads=1, head_size=64, dtype="bfloat16")
    host = Host.assume("sm_90", packages=PACKAGES)
    reasons = reasons_against(spec, request, host, "one", record(spec, "attn-one").label)
    assert [(one.asked, one.fix) for one in reasons] == [
        (texts[1], """pip install 'here>=1; python_version >= '"'"'3'"'"''"""),  # a word of a shell
        ("late[fast]>=1", "pip install 'late[fast]>=1'"),
    ]


def test_installed_knows_what_is_here_only():
    found = installed(("numpy", "a-distribution-that-does-not-exist"))
    assert set(found) == {"numpy"}


@pytest.mark.parametrize("marker", ["os_name ~= 'posix'", "'x' in extras", "platform_machine ~= '4'"])
def test_a_marker_that_cannot_be_evaluated_is_the_specs_own_mistake(marker):
    with pytest.raises(ValueError, match="its marker cannot be evaluated here"):
        needed([f"torch>=2; {marker}"])
    with pytest.raises(ValueError, match=r"requires: .* its marker cannot be evaluated here"):
        BackendSpec(
            name="one", api=1, factory="one:B", devices={"any": 1}, dtypes={"bfloat16"}, head_sizes={64},
            block_sizes=MultipleOf(16), requires=(f"torch; {marker}",),
        )  # fmt: skip
