"""KV-cache groups, and batches of them, for the tests of several groups."""

from attncore.builder import InputBatch, KVCacheGroup

FULL, WINDOW = KVCacheGroup("full", 4), KVCacheGroup("window", 4, sliding_window=6)
CROSS = KVCacheGroup("encoder", 4, cross=True)


def batch_of(kernels, *groups, max_num_reqs=4, max_model_len=40, **options):
    return InputBatch(max_num_reqs=max_num_reqs, max_model_len=max_model_len, groups=groups, kernels=kernels, **options)


def cross_batch(kernels, **options):
    batch = batch_of(kernels, FULL, CROSS, max_encoder_len=12, **options)
    batch.add_request("a", {"full": [1, 2], "encoder": [3, 4]}, encoder_seq_len=5)
    batch.add_request("b", {"full": [5, 6], "encoder": []})
    return batch
