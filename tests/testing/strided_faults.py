"""Faults of strided tensors: a step, a method or a kind of layer that takes a pointer and the usual strides."""

from testing.faulty_backend import Fault, forward

ENCODERS = "features={'encoder', 'encoder_decoder', 'lse'}, head_size_v=MultipleOf(8)"
FLAT = """
def flat(tensor, when=True):
    if tensor is None or not when:
        return tensor
    return torch.as_strided(tensor, tensor.shape, torch.empty(tensor.shape).stride())
"""


def flattens_queries(when: str, name: str = "forward") -> str:
    """Code of a layer that takes queries for contiguous where ``when``."""
    return FLAT + forward(f"return whole(flat(query, {when}), key, value, kv_cache, metadata, output)", name)


STRIDED_FAULTS = (
    Fault(
        "assumes_contiguous_keys",
        "test_strided_tensors",
        "with strided tensors",
        forward(
            """
key = torch.as_strided(key, key.shape, (key.shape[1] * key.shape[2], key.shape[2], 1))
return whole(query, key, value, kv_cache, metadata, output)
"""
        ),
    ),
    Fault(
        "assumes_contiguous_heads",
        "test_strided_tensors[gaps]",
        "with strided tensors (gaps",
        forward(
            """
query = torch.as_strided(query, query.shape, (query.stride(0), query.shape[2], 1))
return whole(query, key, value, kv_cache, metadata, output)
"""
        ),
    ),
    Fault(
        "values_take_the_strides_of_keys",
        "test_strided_tensors[gaps]",
        "with strided tensors (gaps",
        forward("""
if key.shape == value.shape:
    value = torch.as_strided(value, value.shape, key.stride())
return whole(query, key, value, kv_cache, metadata, output)
"""),
    ),
    Fault(
        "assumes_a_contiguous_output",
        "test_strided_tensors",
        "wrote beside its strided output",
        forward(
            """
answer = whole(query, key, value, kv_cache, metadata)
if output is None:
    return answer
torch.as_strided(output, answer.shape, answer.stride()).copy_(answer)
output.copy_(answer)
return output
"""
        ),
    ),
    Fault(
        "assumes_contiguous_queries_in_decodes",
        "test_strided_tensors",
        "with strided tensors",
        flattens_queries("max(np.diff(metadata.host.query_start_loc)) == 1"),
    ),
    Fault(
        "assumes_contiguous_queries_without_writing",
        "test_strided_tensors",
        "forward(..., write=False)",
        flattens_queries("not whole.keywords['write']"),
    ),
    Fault(
        "assumes_contiguous_queries_with_log_sum_exp",
        "test_strided_tensors",
        "forward_with_lse",
        flattens_queries("True", "forward_with_lse"),
        "features={'lse'}",
    ),
    Fault(
        "writes_a_cache_of_contiguous_keys",
        "test_strided_tensors",
        "write_cache left another cache than forward does",
        FLAT
        + """
def write_cache(self, key, value, kv_cache, metadata):
    super(Impl, self).write_cache(flat(key), value, kv_cache, metadata)
Impl.write_cache = write_cache
""",
    ),
    Fault(
        "writes_a_cache_of_contiguous_values",
        "test_strided_tensors",
        "write_cache left another cache than forward does",
        FLAT
        + """
def write_cache(self, key, value, kv_cache, metadata):
    super(Impl, self).write_cache(key, flat(value), kv_cache, metadata)
Impl.write_cache = write_cache
""",
    ),
    Fault(
        "assumes_contiguous_queries_over_latent_caches",
        "test_strided_tensors_of_a_latent_layer",
        "with strided tensors",
        flattens_queries("self.backend.config.use_mla"),
        "use_mla=True",
    ),
    Fault(
        "assumes_contiguous_queries_of_encoders",
        "test_strided_tensors_of_an_encoder",
        "with strided tensors",
        flattens_queries("self.attn_type in ('encoder', 'encoder_only')"),
        ENCODERS,
    ),
    Fault(
        "assumes_contiguous_queries_of_cross_layers",
        "test_strided_tensors_of_a_cross_layer",
        "with strided tensors",
        flattens_queries("self.attn_type == 'encoder_decoder'"),
        ENCODERS,
    ),
)
