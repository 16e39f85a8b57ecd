"""A prompt and a decode of an encoder/decoder model, as groups of the list builder."""

from attncore.builder import Sequence, SequenceGroup


def prompt(encoder_seq_len=6, cross_block_table=(7, 9), block_table=(5,), seq_id=0):
    return SequenceGroup(True, [Sequence(seq_id, 3, 0, block_table)], False, encoder_seq_len, cross_block_table)


def decode(encoder_seq_len=5, cross_block_table=(2, 3), block_table=(5,), seq_id=0):
    return SequenceGroup(False, [Sequence(seq_id, 1, 3, block_table)], False, encoder_seq_len, cross_block_table)
