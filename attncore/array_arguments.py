"""Checks of array arguments: lengths, block tables, block ids, and arrays to write to.

Errors begin with the argument's name. An array that already has the right dtype and layout is not copied.
"""

from __future__ import annotations

import sys
from contextlib import suppress
from itertools import islice
from typing import Any

import numpy as np
import numpy.typing as npt

from attncore.arguments import INT32_MAX, UNREADABLE, integer_or_none, tensor_type, why_no_list
from attncore.quoted import MAX_PART, one_line, quoted, type_name
from attncore.show import counted

Int32Array = npt.NDArray[np.int32]
Int64Array = npt.NDArray[np.int64]

MOST_TOKENS = 1 << 28
"""Tokens of a step, or of a request on a rank, that host functions make arrays for: 2 GiB of slots. Two small numbers
may ask for 2**31, which take all memory."""
MOST_BLOCKS = 1 << 29
"""Block ids of a table that they make: 2 GiB."""

_INT32 = np.dtype(np.int32)
_NUMBERS = frozenset({int, float, bool})


def lengths(name: str, values: npt.ArrayLike, least: int) -> Int32Array:
    """``values`` as int32[n]; ValueError where one is below ``least`` or does not fit. An int32 array is not copied."""
    if (
        type(values) is np.ndarray  # what a subclass says of itself is its own code
        and values.dtype is _INT32
        and values.ndim == 1
        and values.flags.c_contiguous
        and values.flags.aligned
        and (not values.size or np.minimum.reduce(values) >= least)
    ):
        return values
    return _check_lengths(name, values, least)


def as_array(name: str, values: npt.ArrayLike) -> npt.NDArray[Any]:
    """``values`` as an aligned array of any dtype.

    ValueError where they are none, such as rows of two lengths. TypeError where some are hidden by a mask, for the
    array would have what is behind it, and for bytes, which are text.
    """
    check_readable(name, values)
    try:
        if isinstance(values, tensor_type()) and values.is_cpu and beyond_its_memory(values):
            raise ValueError("its shape reaches beyond its memory, as after a resize_ that torch refused")
        found = np.asanyarray(values)  # what ``__array__`` returns may have a mask, too
        if hides_values(found):
            raise _hidden(name)
        array = np.asarray(found)
        if array.dtype.names is not None and array.dtype.kind in "iu":  # whole numbers whose parts have names too
            array = array.view(array.dtype.str)
        return array if array.flags.aligned else array.copy()  # compiled code reads whole numbers at their addresses
    except UNREADABLE as error:
        raise ValueError(
            f"{name}: {type(values).__name__} cannot be read as an array: {one_line(error, MAX_PART)}"
        ) from error
    except RuntimeError as error:
        if type(error) is not RuntimeError or not _holds_tensor(values):
            raise  # it is not torch's refusal, but comes from the caller's own object
        raise ValueError(
            f"{name}: {type(values).__name__} cannot be read as an array: {one_line(error, MAX_PART)}"
        ) from error


def check_readable(name: str, values: Any) -> None:
    """TypeError where NumPy would read as numbers what is none: values that a mask hides, and bytes.

    Lists and tuples are looked into, for NumPy reads the arrays in them. For callers that convert by themselves.
    """
    if isinstance(values, bytearray | memoryview) and (why := why_no_list(values)) is not None:
        raise TypeError(f"{name}: {why}")
    if hides_values(values):
        raise _hidden(name)
    for item in _nested(values):
        check_readable(name, item)


def hides_values(values: Any) -> bool:
    """Whether it is an array that masks some of its values; ``numpy.ma.masked`` is one of a single value."""
    return isinstance(values, np.ma.MaskedArray) and bool(np.ma.getmaskarray(values).any())


def _hidden(name: str) -> TypeError:
    return TypeError(f"{name}: an array with masked values found; give one without, such as array.compressed()")


def _nested(values: Any) -> list[Any]:
    """Items of a list or a tuple that are no plain numbers."""
    if type(values) is not list and type(values) is not tuple:
        return []
    return [] if _NUMBERS.issuperset(map(type, values)) else [item for item in values if type(item) not in _NUMBERS]


def _holds_tensor(values: Any) -> bool:
    """Whether ``values`` is a tensor, or a list with one in it, whose conversion is torch's work."""
    tensor = tensor_type()
    if tensor == ():
        return False
    return isinstance(values, tensor) or any(_holds_tensor(item) for item in _nested(values))


def beyond_its_memory(tensor: Any) -> bool:
    """Whether a strided tensor reaches beyond its memory: a ``resize_`` that torch refuses leaves such a one."""
    shape = tensor.shape
    if 0 in shape:
        return False
    last: int = tensor.storage_offset()
    for size, stride in zip(shape, tensor.stride(), strict=True):
        last += (size - 1) * stride
    return bool((last + 1) * tensor.itemsize > tensor.untyped_storage().nbytes())


def of_fixed_size(tensor: Any) -> Any:
    """``tensor``, of our own, to which we write for as long as it lives, and which others see. On a CPU its memory
    keeps its size from now on, whatever they do to it.
    """
    if tensor.is_cpu:
        with suppress(RuntimeError):  # a subclass, such as FakeTensor, which may have no memory
            tensor.numpy()  # torch resizes no memory that NumPy has seen
    return tensor


def not_by_address(tensor: Any) -> str | None:
    """Why code that reads a tensor by its address and strides finds other numbers; None where it finds the tensor's.

    TypeError where it is no tensor.
    """
    if not isinstance(tensor, tensor_type()):
        raise TypeError(f"tensor: {type(tensor).__name__} found; give a torch tensor")
    if tensor.is_neg() or tensor.is_conj():
        return "a lazy negative or conjugate, whose memory holds other numbers; give tensor.resolve_conj().clone()"
    return not_strided(tensor)


def not_strided(tensor: Any) -> str | None:
    """Why a tensor is none of strides over memory that it has, such as a sparse one; None where it is one."""
    if tensor.is_nested or tensor.layout is not sys.modules["torch"].strided:
        return f"{'nested, ' if tensor.is_nested else ''}of layout {tensor.layout}; give a strided tensor"
    if beyond_its_memory(tensor):
        return (
            f"shape {tuple(tensor.shape)} found, which reaches beyond the tensor's memory, as after a resize_ that "
            "torch refused; make it anew"
        )
    return None


def why_not_plain(tensor: Any) -> str | None:
    """Why operators of torch may not find the numbers of a tensor that a backend returned, in words that follow it;
    None where they do.
    """
    torch = sys.modules["torch"]
    if type(tensor) is not torch.Tensor and type(tensor) is not torch.nn.Parameter:
        return f"of type {type_name(tensor)}"  # a subclass, such as FakeTensor, may do anything in any operator
    if tensor.is_nested or tensor.layout is not torch.strided:
        return f"{'nested, ' if tensor.is_nested else ''}of layout {tensor.layout}"
    if tensor.device.type != "meta" and beyond_its_memory(tensor):
        return f"of shape {tuple(tensor.shape)}, which reaches beyond its memory"
    return None


def check_tensor(name: str, values: Any) -> None:
    """ValueError where ``values`` is a tensor that is none of strides over memory that it has; others are passed."""
    if not isinstance(values, tensor_type()):
        return
    why = "on meta, which holds no numbers" if values.device.type == "meta" else not_strided(values)
    if why is not None:
        raise ValueError(f"{name}: {why}")


def _check_lengths(name: str, values: npt.ArrayLike, least: int) -> Int32Array:
    array = as_array(name, values)
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
        raise ValueError(f"{name}: {array.dtype}{list(array.shape)}; it must be a list of integers")
    if not array.size:  # of any dtype: NumPy makes floats of []
        return np.zeros(0, np.int32)
    wrong = np.flatnonzero((array < least) | (array > INT32_MAX))
    if len(wrong):
        raise ValueError(f"{name}: {array[wrong[0]]} at index {wrong[0]} is outside {least}..{INT32_MAX}")
    return np.ascontiguousarray(array, dtype=np.int32)


def same_length(name: str, values: npt.NDArray[Any], num_reqs: int) -> None:
    """ValueError unless ``values`` has one length per request."""
    if len(values) != num_reqs:
        raise ValueError(f"{name}: {counted(len(values), 'length')} for {counted(num_reqs, 'request')}; give one each")


def at_most(name: str, count: int, most: int, what: str) -> int:
    """``count``; ValueError where it exceeds ``most``, before an array of that many ``what`` is made."""
    if count > most:
        raise ValueError(f"{name}: {count} {what}, more than {most}, for which an array would be made; give fewer")
    return count


def contexts(query_lens: Int32Array, seq_lens: Int32Array) -> Int32Array:
    """Context lengths int32[n]; ValueError where a request is shorter than its tokens of this step."""
    same_length("seq_lens", seq_lens, len(query_lens))
    context = seq_lens - query_lens
    if len(context) and context.min() < 0:
        row = int(np.argmax(context < 0))
        raise ValueError(
            f"seq_lens: row {row} has {counted(seq_lens[row], 'token')}, fewer than its {query_lens[row]} of this step"
        )
    return context


def context_and_query(
    context_lens: npt.ArrayLike, query_lens: npt.ArrayLike, rows: int | None
) -> tuple[Int32Array, Int32Array]:
    """Both lengths as int32[n]; ValueError where their numbers differ or a request does not fit int32."""
    context, query = lengths("context_lens", context_lens, 0), lengths("query_lens", query_lens, 0)
    if len(context) != len(query) or (rows is not None and rows != len(query)):
        raise ValueError(
            f"query_lens: {counted(len(query), 'length')} for {len(context)} context_lens"
            + (f" and {counted(rows, 'row')} of block_table" if rows is not None else "")
        )
    wrong = np.flatnonzero(context.astype(np.int64) + query > INT32_MAX)
    if len(wrong):
        raise ValueError(
            f"context_lens: row {wrong[0]} ends at token {int(context[wrong[0]]) + int(query[wrong[0]])}, "
            f"beyond {INT32_MAX}"
        )
    return context, query


def block_table(values: npt.ArrayLike, num_rows: int | None = None) -> Int32Array:
    """``values`` as int32[n, width]; ValueError where an id does not fit 0..INT32_MAX or n is not ``num_rows``."""
    array = as_array("block_table", values)
    if array.shape == (0,) and not isinstance(values, np.ndarray):  # a list of no rows
        array = array.reshape(0, 0)
    if array.ndim != 2 or (array.size and array.dtype.kind not in "iu"):
        raise ValueError(
            f"block_table: {array.dtype}{list(array.shape)}; it must be a rectangle (n, width) of integers"
        )
    if array.size and array.dtype != np.int32:
        low, high = int(array.min()), int(array.max())
        if low < 0 or high > INT32_MAX:
            raise ValueError(f"block_table: block id {low if low < 0 else high} is outside 0..{INT32_MAX}")
    if array.size and int(array.min()) < 0:
        raise ValueError(f"block_table: block id {int(array.min())} is outside 0..{INT32_MAX}")
    if num_rows is not None and len(array) != num_rows:
        raise ValueError(
            f"block_table: {counted(len(array), 'row')} for {counted(num_rows, 'request')}; give each its row"
        )
    return np.ascontiguousarray(array, dtype=np.int32)


def block_pairs(name: str, values: Any, num_source: int, num_target: int, *, one: str = "block") -> Int64Array:
    """Pairs int64[n, 2] of block ids, from a cache of ``num_source`` blocks to one of ``num_target``; or of what else
    ``one`` is the word for.

    ValueError where they are none, lie outside of these, or name a destination twice.
    """
    pairs = as_array(name, values)
    if pairs.size == 0:
        return np.empty((0, 2), dtype=np.int64)
    if pairs.ndim != 2 or pairs.shape[1] != 2 or pairs.dtype.kind not in "iu":
        raise ValueError(f"{name}: shape {pairs.shape} of {pairs.dtype} found; give integers of shape (n, 2)")
    for column, blocks in enumerate((num_source, num_target)):
        wrong = pairs[:, column][(pairs[:, column] < 0) | (pairs[:, column] >= blocks)]
        if wrong.size:
            side = ("source", "destination")[column]
            raise ValueError(f"{name}: {side} {one} {wrong[0]} is outside the cache's {counted(blocks, one)}")
    if np.unique(pairs[:, 1]).size != len(pairs):
        raise ValueError(f"{name}: a destination is named twice; each {one} can take one source only")
    return pairs.astype(np.int64)


def check_block_ids_fit(name: str, ids: npt.NDArray[Any]) -> None:
    """ValueError where a block id is negative or does not fit int32."""
    low, high = int(ids.min()), int(ids.max())
    if low < 0 or high > INT32_MAX:
        raise ValueError(f"{name}: block id {low if low < 0 else high} is outside 0..{INT32_MAX}")


def bad_block_ids(
    ids: Any, limit: int, most: int | None = None
) -> tuple[type[ValueError] | type[TypeError], str] | None:
    """The error (type and text) of block ids that the kernels refused; None where only the room was too small.

    ``most``: of that many and no more, for there may be far more than there is room for.
    """
    if (why := why_no_list(ids)) is not None:
        return TypeError, why
    if not hasattr(ids, "__len__"):
        return TypeError, f"{quoted(ids)} is not a sequence of block ids"
    try:
        len(ids)
        items = list(ids if most is None else islice(ids, most))  # islice hides how many there are
    except UNREADABLE:
        return TypeError, f"{type(ids).__name__} is not a sequence of block ids that can be read"
    for index, item in enumerate(items):
        value = integer_or_none(item)
        if value is None:
            shown = item.item() if isinstance(item, np.generic) else item
            return TypeError, f"block id {quoted(shown)} at index {index} is not an integer"
        if not 0 <= value < limit:
            return ValueError, f"block id {quoted(value)} at index {index} is outside 0..{limit - 1}"
    return None


def output(name: str, out: Any, shape: int | tuple[int, ...], dtype: type[np.generic]) -> Any:
    """``out``, checked to be an array of that shape and dtype, or a new array where it is None."""
    shape = shape if isinstance(shape, tuple) else (shape,)
    if out is None:
        return np.empty(shape, dtype)
    wanted = f"it must be {np.dtype(dtype)}{list(shape)}, contiguous and writable"
    if not isinstance(out, np.ndarray):
        raise TypeError(f"{name}: {type(out).__name__} is no array; {wanted}")
    out = np.asarray(out)  # of a subclass, which may say anything of itself, the plain array
    if out.shape != shape or out.dtype != dtype or out.dtype.names is not None or not out.flags.carray:
        raise ValueError(f"{name}: {out.dtype}{list(out.shape)}; {wanted}")
    return out


def too_few_blocks(held: int, tokens: int, block_size: int, what: str = "token") -> str:
    """What is wrong with a table of ``held`` blocks for a request of ``tokens``, in words that follow its name."""
    needed = -(-tokens // block_size)
    return (
        f"holds {counted(held, 'block')} but needs {needed} for its {counted(tokens, what)} (block_size {block_size}); "
        f"append {needed - held}"
    )
