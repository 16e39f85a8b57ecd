"""Operations for backends and models: the cache writer with its kernel, the torch operator, the forward context.

``not_by_address(tensor)`` says why a kernel that reads by address and strides must not be given a tensor, or None.
``check_cross_rows(metadata, num_rows)`` refuses a step, for a cross layer, whose encoders' fields have other rows than
its requests.
"""

from attncore.array_arguments import not_by_address
from attncore.ops.cross_rows import check_cross_rows

__all__ = ["check_cross_rows", "not_by_address"]
