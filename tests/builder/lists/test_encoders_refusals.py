"""What the list builder refuses of encoders, and that each refusal names the field."""

import copy

import numpy as np
import pytest
from builder.lists.encoder_groups import decode, prompt

from attncore.builder import CommonMetadataBuilder, Sequence, SequenceGroup


class Odd:
    def __index__(self):
        raise RuntimeError("no index")


BAD = [
    ([decode(None, None)], r"groups\[0\].encoder_seq_len: missing; every group of an encoder/decoder step has one"),
    ([decode(None)], r"groups\[0\].encoder_seq_len: missing, but cross_block_table is given"),
    ([prompt(), decode(None, None)], r"groups\[1\].encoder_seq_len: missing"),
    ([decode()[:3]], r"groups\[0\].encoder_seq_len: missing"),
    ([decode(5, None)], r"groups\[0\].cross_block_table: missing; blocks are needed for 5 encoder tokens"),
    ([prompt(5, None)], r"groups\[0\].cross_block_table: missing; blocks are needed for 5 encoder tokens"),
    ([prompt(block_table=None)], r"groups\[0\].cross_block_table: given, but the group's block tables are null"),
    ([prompt(block_table=None, cross_block_table=[])], r"cross_block_table: given, but"),
    (
        [prompt(), decode(9, seq_id=31)],
        r"groups\[1\].cross_block_table: sequence 31 holds 2 blocks but needs 3 for its 9 encoder tokens "
        r"\(block_size 4\)",
    ),
    ([prompt(1, [])], r"groups\[0\].cross_block_table: sequence 0 holds 0 blocks but needs 1 for its 1 encoder token "),
    ([decode(-1)], r"groups\[0\].encoder_seq_len: -1 is outside 0..2147483647"),
    ([decode(2**31)], r"groups\[0\].encoder_seq_len: 2147483648 is outside"),
    ([decode(np.int64(-3))], r"groups\[0\].encoder_seq_len: -3 is outside"),
    ([decode(True)], r"groups\[0\].encoder_seq_len: True is not an integer"),
    ([decode(2.0)], r"groups\[0\].encoder_seq_len: 2.0 is not an integer"),
    ([decode("5")], r"groups\[0\].encoder_seq_len: '5' is not an integer"),
    ([decode(Odd())], r"groups\[0\].encoder_seq_len: .* is not an integer"),
    ([decode(), decode(5, 3)], r"groups\[1\].cross_block_table: 3 is not a sequence of block ids"),
    ([decode(5, np.array(3))], r"groups\[0\].cross_block_table: array\(3\) is not a sequence of block ids"),
    ([decode(5, iter([1, 2]))], r"groups\[0\].cross_block_table: .* is not a sequence of block ids"),
    ([decode(5, [1, -2])], r"groups\[0\].cross_block_table: block id -2 at index 1 is outside 0..2147483647"),
    ([prompt(5, [1, 2**31])], r"groups\[0\].cross_block_table: block id 2147483648 at index 1"),
    ([prompt(), prompt(5, [1, True])], r"groups\[1\].cross_block_table: block id True at index 1 is not an integer"),
    ([decode(5, np.array([1.0, 2.0]))], r"cross_block_table: block id 1.0 at index 0 is not an integer"),
    ([decode(5, np.zeros((2, 2), np.int32))], r"cross_block_table: block id .* is not an integer"),
    ([decode(0, [1, "x"])], r"groups\[0\].cross_block_table: block id 'x' at index 1"),
    ([prompt(0, [-1])], r"groups\[0\].cross_block_table: block id -1"),
    ([decode(block_table=[]), decode(-1)], r"groups\[0\].sequences\[0\].block_table: sequence 0 holds 0 blocks"),
]  # fmt: skip


@pytest.mark.parametrize(("groups", "message"), BAD)
def test_a_bad_step_names_the_field(kernels, groups, message):
    builder = CommonMetadataBuilder(4, encoder_decoder=True, kernels=kernels)
    before = copy.copy(vars(builder))
    with pytest.raises((ValueError, TypeError), match=f"^{message}" if message[0] == "g" else message):
        builder.build(groups)
    assert vars(builder) == before
    assert builder.build([decode()]).cross_block_table.tolist() == [[2, 3]]  # the builder is as good as new


def test_the_bad_group_is_found_behind_one_of_several_sequences(kernels):
    builder = CommonMetadataBuilder(4, encoder_decoder=True, kernels=kernels)
    three = SequenceGroup(False, [Sequence(i, 1, 3, [5]) for i in range(3)], False, 5, [2, 3])
    with pytest.raises(ValueError, match=r"^groups\[1\].cross_block_table: block id -7"):
        builder.build([three, decode(5, [1, -7])])
    assert builder.build([three]).cross_block_table.tolist() == [[2, 3]] * 3


def test_lengths_of_a_step_fit_int32(kernels):
    builder = CommonMetadataBuilder(2**30, encoder_decoder=True, max_seq_len_to_capture=2**31 - 1, kernels=kernels)
    half = SequenceGroup(False, [Sequence(0, 1, 3, [5])], False, 2**30, [1])
    with pytest.raises(ValueError, match=r"^encoder_seq_len: the sum 2147483648 over this step does not fit int32"):
        builder.build([half, half])
    most = half._replace(encoder_seq_len=2**31 - 1, cross_block_table=[1, 2])
    assert builder.build([most]).encoder_seq_start_loc.tolist() == [0, 2**31 - 1]
    with pytest.raises(ValueError, match=r"^encoder_seq_len: the sum 2147483647"):
        builder.build([most], 1)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"layout": "flashinfer", "encoder_decoder": True},
            "layout: flashinfer has no encoder/decoder attention; comm",
        ),
        ({"encoder_decoder": 1}, "encoder_decoder: 1 is not True or False"),
        ({"max_encoder_seq_len_to_capture": 5}, "max_encoder_seq_len_to_capture: given, but encoder_decoder is false"),
        (
            {"encoder_decoder": True, "max_encoder_seq_len_to_capture": 0},
            "max_encoder_seq_len_to_capture: 0 is below 1",
        ),
    ],
)
def test_bad_arguments_name_themselves(arguments, message):
    with pytest.raises((ValueError, TypeError), match=f"^{message}"):
        CommonMetadataBuilder(4, **arguments)


def test_a_builder_of_decoders_refuses_encoders(kernels):
    with pytest.raises(ValueError, match=r"^groups\[0\].encoder_seq_len: given to a builder that was not made with"):
        CommonMetadataBuilder(4, kernels=kernels).build([decode()])


class Liar:
    """Says that it has three ids, and gives one."""

    def __len__(self):
        return 3

    def __iter__(self):
        return iter([7])

    def __getitem__(self, index):
        return [7][index]


@pytest.mark.parametrize("group", [prompt(9, Liar()), decode(9, Liar())], ids=["prompt", "decode"])
def test_a_table_is_as_long_as_what_it_yields(group, kernels):
    """Else the tokens beyond would lie in block 0, which is nobody's."""
    builder = CommonMetadataBuilder(4, "common", encoder_decoder=True, kernels=kernels)
    with pytest.raises(
        ValueError, match=r"cross_block_table: sequence \d+ holds 1 block but needs 3 for its 9 encoder tokens"
    ):
        builder.build([group])
