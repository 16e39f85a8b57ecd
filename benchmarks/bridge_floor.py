"""What no bridge into vLLM can leave out of a step's ``build``: its cost is the floor of what a bridge takes."""

import ctypes

from attncore.builder.adopted.size import new_arrays


class Floor:
    """Reads starts and lengths of the host by their addresses, checks them and fills a step, in one compiled call.

    Nothing is compared with a step before, nothing is launched and no metadata is made. ``steps`` are the AdoptedSteps
    of the bridge, whose limits it has; its memory is its own.
    """

    def __init__(self, steps):
        limits = steps._settings
        rows = steps._kernels.AdoptedRows(
            new_arrays(limits.max_num_reqs), limits.max_num_reqs, limits.max_num_tokens, limits.block_size,
            limits.max_model_len, limits.decode_threshold, 0,
        )  # fmt: skip
        self._fill, self._columns, self._types = rows.fill, limits.max_pages, {}

    def _array(self, tensor):
        count = len(tensor)
        kind = self._types.get(count)
        if kind is None:
            kind = self._types[count] = ctypes.c_int32 * count
        return kind.from_address(tensor.data_ptr())

    def build(self, common_prefix_len, given):
        starts, lengths = self._array(given.query_start_loc_cpu), self._array(given.seq_lens_cpu_upper_bound)
        return self._fill(starts, lengths, given.num_actual_tokens, self._columns, 0, True, False)
