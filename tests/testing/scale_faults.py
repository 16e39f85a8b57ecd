"""Faults of the scales of an fp8 cache, and of such caches as bytes."""

from testing.faulty_backend import Fault, forward

SCALES = (
    "features={'kv_scales', 'kv_scales_on_device', 'kv_scales_per_head', 'sliding_window'}, "
    "kv_cache_dtypes={'auto', 'fp8_e4m3'}"
)


def _scales(pair: str) -> str:
    """Code of a layer whose scales, of keys and of values, are ``pair``; ``k`` and ``v`` are its own."""
    return f"""
def _scales(self):
    k, v = self.k_scale, self.v_scale
    return {pair}
Impl._scales = property(_scales)
"""


SCALE_FAULTS = (
    Fault(
        "scales_ignored",
        "test_scales_of_an_fp8_cache[k_scale]",
        "it is as if the scales were 1, by which",
        _scales("1.0, 1.0"),
        SCALES,
    ),
    Fault(
        "scale_of_values_ignored",
        "test_scales_of_an_fp8_cache[v_scale]",
        "it is as if the scales were 1, by which",
        _scales("k, 1.0"),
        SCALES,
    ),
    Fault(
        "a_scale_on_the_device_taken_for_one",
        "test_scales_on_the_device[v_scale]",
        "it is as if the scales were 1, by which",
        _scales("k, 1.0 if torch.is_tensor(v) else v"),
        SCALES,
    ),
    Fault(
        "scales_of_the_first_head",
        "test_scales_of_each_head",
        "must be what was written, for an engine may write it too",
        _scales("(k.flatten()[:1], v) if torch.is_tensor(k) else (k, v)"),
        SCALES,
    ),
    Fault(
        "scales_exchanged",
        "test_scales_of_each_head",
        "must be what was written, for an engine may write it too",
        _scales("v, k"),
        SCALES,
    ),
    Fault(
        "scales_of_the_making",
        "test_scales_set_after_the_layer_is_made[numbers]",
        "it is as if the scales were those before set_scales",
        _scales("self.__dict__.setdefault('first', (k, v))")
        + """
def init(self, backend, layer_name, **features):
    super(Impl, self).__init__(backend, layer_name, **features)
    self._scales
Impl.__init__ = init
""",
        SCALES,
    ),
    Fault(
        "scales_of_heads_read_once",
        "test_scales_set_after_the_layer_is_made[per_head]",
        "it is as if the scales were those before set_scales",
        """
def init(self, backend, layer_name, **features):
    super(Impl, self).__init__(backend, layer_name, **features)
    self.first = [one.clone() if torch.is_tensor(one) else one for one in (self.k_scale, self.v_scale)]
Impl.__init__ = init
Impl._scales = property(lambda self: tuple(self.first))
""",
        SCALES,
    ),
    Fault(
        "scales_calculated_without_room",
        "test_calculated_scales",
        "calculate_kv_scales made k_scale [128.0], not 256.0",
        """
def calculate_kv_scales(self, key, value):
    super(Impl, self).calculate_kv_scales(key / 2, value)
Impl.calculate_kv_scales = calculate_kv_scales
""",
        SCALES,
    ),
    Fault(
        "scales_as_numbers_in_a_graph",
        "test_captured_sizes_see_scales_that_are_set",
        "it is as if the scales were those before set_scales",
        _scales("self.__dict__.setdefault('first', (float(k), float(v))) if torch.is_tensor(k) else (k, v)"),
        SCALES,
    ),
    Fault(
        "bytes_taken_for_numbers",
        "test_an_fp8_cache_as_bytes[fp8_e4m3]",
        "with an fp8 cache as uint8: ConformanceError: forward wrote nothing to slot",
        forward("""
if kv_cache.dtype == torch.uint8:
    kv_cache = kv_cache.to(torch.float8_e4m3fn)
return whole(query, key, value, kv_cache, metadata, output)
"""),
        SCALES,
    ),
    Fault(
        "bytes_of_the_other_format",
        "test_an_fp8_cache_as_bytes[fp8_e4m3]",
        "with an fp8 cache as uint8: ConformanceError: the output differs",
        forward("""
if kv_cache.dtype == torch.uint8 and not write:
    kv_cache = kv_cache.view(torch.float8_e5m2)
if kv_cache.dtype == torch.uint8 and write and not metadata.num_prefills:
    self.write_cache(key, value, kv_cache, metadata)
    held = kv_cache.view(torch.float8_e4m3fn).float().to(torch.float8_e5m2)
    return whole(query, key, value, held.float().to(torch.float8_e4m3fn).flip(0), metadata, output)
return whole(query, key, value, kv_cache, metadata, output)
"""),
        SCALES,
    ),
)
