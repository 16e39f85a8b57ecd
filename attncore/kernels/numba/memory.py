"""Structs of 64-bit numbers and addresses, which compiled loops and Python objects share.

A loop takes the address of a struct as one int: reading the arguments of a call is most of what a small one costs, and
an array takes several times as long as an int. In a loop, ``struct_at`` is the struct, ``lengths_at`` and its like are
arrays without an end, as pointers are in C. An object that owns a struct (Words) owns or keeps what its addresses name.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from attncore.kernels.numba.library import from_dtype, intrinsic, types

LENGTH, SLOT = 4, 8
"""Bytes of a length and of a slot."""

wide: Any = np.int64
"""Makes a number of a loop one of 64 bits."""


class Struct:
    """Names of 64-bit numbers in turn. ``type`` is numba's type of such a struct."""

    def __init__(self, *names: str) -> None:
        self.names = names
        self.type = from_dtype(np.dtype([(name, np.int64) for name in names], align=True))


class Words:
    """Owner of one struct: ``words`` has its numbers, ``address`` says where they are."""

    words: memoryview
    address: int

    def _own(self, struct: Struct, **values: int) -> None:
        memory: Any = np.zeros(len(struct.names), np.int64)
        self.words, self.address = memoryview(memory), address_of(memory, np.int64)
        for name, value in values.items():
            self.words[struct.names.index(name)] = value


def number(struct: Struct, name: str) -> Any:
    """A property of a class of Words: one of its numbers."""
    index = struct.names.index(name)

    def read(self: Words) -> int:
        return self.words[index]

    def write(self: Words, value: int) -> None:
        self.words[index] = value

    return property(read, write)


def address_of(array: Any, dtype: Any) -> int:
    """The address of an array's memory; ValueError where loops could not take it for items of ``dtype`` in a row."""
    if array.dtype != dtype or not array.flags.c_contiguous or not array.flags.writeable:
        raise ValueError(f"an array of {np.dtype(dtype)} that is contiguous and can be written to: {array.dtype} found")
    return int(array.__array_interface__["data"][0])


def _cast(result: Any, *args: Any) -> Any:
    """What an intrinsic returns whose first argument is an address, which becomes a ``result``."""

    def codegen(context: Any, builder: Any, signature: Any, given: Any) -> Any:
        return builder.inttoptr(given[0], context.get_value_type(signature.return_type))

    return result(*args), codegen


@intrinsic
def struct_at(typingctx, address, kind):  # the struct itself, not a copy
    return _cast(kind.instance_type, address, kind)


@intrinsic
def lengths_at(typingctx, address):
    return _cast(types.CPointer(types.int32), address)


@intrinsic
def longs_at(typingctx, address):
    return _cast(types.CPointer(types.int64), address)


@intrinsic
def bytes_at(typingctx, address):
    return _cast(types.CPointer(types.uint8), address)
