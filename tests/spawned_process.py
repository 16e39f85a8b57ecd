"""What test_processes runs in a spawned process, which imports it by this name."""

from attncore.builder import InputBatch, MetadataBuilder


def slots_of_a_step(requests):
    """The slots of a decode of ``requests``: (name, blocks, computed tokens)."""
    batch = InputBatch(max_num_reqs=4, max_model_len=64, block_size=4)
    for req_id, blocks, computed in requests:
        batch.add_request(req_id, blocks, computed)
    return MetadataBuilder(batch, max_num_batched_tokens=16).build().slot_mapping.tolist()
