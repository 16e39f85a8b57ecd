"""Operations for backends and models: the cache writer with its kernel, the torch operator, the forward context.

``not_by_address(tensor)`` says why a kernel that reads by address and strides must not be given a tensor, or None.
"""

from attncore.array_arguments import not_by_address

__all__ = ["not_by_address"]
