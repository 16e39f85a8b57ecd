"""What reference refuses, and that the message begins with the argument's name."""

import dataclasses
from types import SimpleNamespace

import pytest
import torch
from reference.encoder_cases import make_cross, make_encoder

from attncore.reference import ReferenceBackend, attncore_backend


@pytest.fixture
def case(paged_case):
    return paged_case([(5, 1), (0, 3)])


@pytest.mark.parametrize("name", ["query", "key", "value"])
def test_shapes_and_dtypes(case, name):
    tensor = getattr(case, name)
    for wrong in (tensor[1:], tensor[..., 1:], tensor[:, 1:], tensor.flatten(1), tensor.double(), tensor.bfloat16()):
        with pytest.raises(ValueError, match=f"^{name}: "):
            case.forward(**{name: wrong})


def test_output(case):
    with pytest.raises(ValueError, match=r"^output: "):
        case.forward(output=torch.empty(1, 4, 8))


def _without_memory(tensor):
    found = tensor.clone()
    found.untyped_storage().resize_(0)
    return found


ODD_TENSORS = {
    "sparse": torch.Tensor.to_sparse,
    "nested": lambda tensor: torch.nested.nested_tensor([tensor[0], tensor[0, :1]]),
    "of another layout": torch.Tensor.to_mkldnn,
    "without memory": _without_memory,
}


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("write", [True, False])
@pytest.mark.parametrize("name", ["query", "key", "value", "kv_cache", "output"])
@pytest.mark.parametrize("kind", ODD_TENSORS)
def test_tensors_that_are_not_strided(paged_case, kind, name, write):
    for latent in ({}, {"use_mla": True, "num_kv_heads": 1, "head_size_v": 4}):
        case = paged_case([(5, 1), (0, 3)], **latent)
        if (not write and name in ("key", "value")) or (latent and name == "value"):
            continue  # it is not read
        given = {"query": case.query, "key": case.key, "value": case.value, "kv_cache": case.cache}
        odd = ODD_TENSORS[kind](given.get(name, case.expected))
        before = case.cache.clone()
        with pytest.raises(ValueError, match=f"^{name}: "):
            case.forward(**{name: odd, "write": write})
        torch.testing.assert_close(case.cache, before, equal_nan=True)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("kind", ODD_TENSORS)
def test_latent_rows_that_are_not_strided_or_have_no_dimension(paged_case, kind):
    case = paged_case([(5, 1), (0, 3)], use_mla=True, num_kv_heads=1, head_size_v=4)
    impl = case.backend.impl("layer", scale=1.0)
    for odd in (ODD_TENSORS[kind](case.key), torch.tensor(1.0)):
        with pytest.raises(ValueError, match=r"^key: "):
            case.forward(key=odd)
        with pytest.raises(ValueError, match=r"^key: "):
            impl.write_cache(odd, None, case.cache, case.metadata)


def test_a_cache_in_the_place_of_metadata(case):
    with pytest.raises(TypeError, match=r"^metadata: Tensor found.*, behind kv_cache: forward\(query, "):
        case.backend.impl("x", scale=1.0).forward(case.query, case.key, case.value, case.metadata, case.cache)


def test_nothing_is_written_when_an_argument_is_wrong(case):
    before = case.cache.clone()
    with pytest.raises(ValueError, match=r"^value: "):
        case.forward(value=case.value[1:])
    torch.testing.assert_close(case.cache, before, equal_nan=True)


def test_caches(case):
    wrong = [
        case.cache[0, :, :, 0],
        case.cache[0],
        case.cache[:, :, 1:],
        case.cache[:, :, :, 1:],
        case.cache.half(),
        [case.cache[0]],
    ]
    for cache in [*wrong, case.cache.transpose(0, 1)]:
        with pytest.raises(ValueError, match=r"^kv_cache: "):
            case.forward(kv_cache=cache)
    with pytest.raises(ValueError, match=r"^kv_cache: none given"):
        case.forward(kv_cache=None)


@pytest.mark.parametrize("name", ["query", "key", "value", "kv_cache"])
def test_devices(case, name):
    tensor = (case.cache if name == "kv_cache" else getattr(case, name)).to("meta")
    with pytest.raises(ValueError, match=r"^[a-z_]+: on (cpu|meta), but the query is on"):
        case.forward(**{name: tensor})


def test_metadata_of_another_device(case):
    case.metadata.block_table = case.metadata.host.block_table
    with pytest.raises(ValueError, match=r"^metadata: block_table is a ndarray"):
        case.forward()


def test_tables(case):
    case.metadata.block_table = case.metadata.block_table[:, :1]
    with pytest.raises(ValueError, match=r"^metadata: block table row 0 has 1 column, but needs 2 for 6 tokens"):
        case.forward()


@pytest.mark.parametrize("block", [4, -1, 100])
def test_block_ids(case, block):
    case.metadata.host.block_table[0, 0] = block
    with pytest.raises(ValueError, match=rf"^metadata: the block table names block {block}, .* holds 4 blocks"):
        case.forward()


def test_lengths(case):
    case.metadata.host.seq_lens[1] = 2
    with pytest.raises(ValueError, match=r"^metadata: row 1 has seq_lens 2, fewer than its query tokens"):
        case.forward()


@pytest.mark.parametrize(
    ("argument", "value"),
    [
        ("k_scale", 0.5),
        ("v_scale", 2.0),
        ("sliding_window", 0),
        ("logits_soft_cap", 0.0),
        ("alibi_slopes", [0.5] * 3),
        ("sinks", [0.5] * 5),
    ],
)
def test_layers(case, argument, value):
    with pytest.raises(ValueError, match=f"^{argument}: "):
        case.backend.impl("layer", scale=1.0, **{argument: value})


@pytest.mark.parametrize(
    ("argument", "value"),
    [
        ("kv_cache_layout", "own"),
        ("kv_cache_dtype", "int8"),
        ("dtype", "int8"),
        ("head_size_v", 0),
        ("use_mla", True),  # two heads
    ],
)
def test_configurations(case, argument, value):
    with pytest.raises(ValueError, match=r"^[a-z_]+: "):
        ReferenceBackend(dataclasses.replace(case.backend.config, spec=attncore_backend(), **{argument: value}))


@pytest.mark.parametrize(
    "options",
    [{}, {"use_mla": True, "num_kv_heads": 1, "head_size_v": 4}, {"head_size_v": 4}, {"kv_cache_dtype": "float16"}],
    ids=["plain", "latent", "another size of values", "another dtype of the cache"],
)
def test_check_step_says_what_forward_says_and_writes_nothing(paged_case, options):
    case = paged_case([(5, 1), (0, 3)], **options)
    impl, before = case.backend.impl("layer", **case.features), case.cache.clone()
    assert impl.check_step(**case.given()) is None
    assert impl.check_step(**case.given(key=None, value=None), write=False) is None
    for wrong in (
        {"query": case.query[1:]}, {"query": case.query.double()}, {"key": case.key[1:]}, {"key": case.key.double()},
        {"key": None}, {"kv_cache": None}, {"kv_cache": case.cache[:, :1]}, {"output": case.query[1:]},
    ):  # fmt: skip
        texts = []
        for call in (impl.check_step, impl.forward):
            with pytest.raises(ValueError, match=f"^{next(iter(wrong))}: ") as caught:
                call(**case.given(**wrong))
            texts.append(str(caught.value))
        assert texts[0] == texts[1] or "kv_cache" in wrong  # whose shapes are told in other words
    torch.testing.assert_close(case.cache.view(torch.uint8), before.view(torch.uint8))
    impl.forward(**case.given())
    assert not torch.equal(case.cache.view(torch.uint8), before.view(torch.uint8))


@pytest.mark.parametrize(
    "case",
    [make_encoder([3, 5]), make_encoder([3, 5], kind="encoder_only"), make_cross([(5, True, 2), (3, False, 1)])],
    ids=lambda case: case.kind,
)
def test_check_step_of_layers_that_are_not_causal(case):
    assert case.impl().check_step(**case.given()) is None
    with pytest.raises(ValueError, match=r"^key: "):
        case.impl().check_step(**case.given(key=case.key[..., 1:]))
    with pytest.raises(ValueError, match=r"^metadata: it has no "):
        case.impl().check_step(**case.given(metadata=SimpleNamespace(host=SimpleNamespace())))
