"""Checks of scalar arguments. Errors begin with the argument's name and say what was given and what is allowed.

An integer is a Python int, a NumPy integer of any width, a 0-d array or tensor of integers, or any other object whose
``__index__`` gives one. A bool of any library, a float and an array with dimensions are none. A value is converted
once: what goes on is the int that is returned here, and never the object, which may answer differently when it is asked
again. A name, likewise, is a plain str from then on: a subclass may hash or compare otherwise the next time. Checks of
arrays are in ``array_arguments``. The module imports nothing heavy, so that light modules may use it.
"""

from __future__ import annotations

import operator
import re
import sys
from collections.abc import Iterable, KeysView, Mapping, Set
from itertools import islice
from typing import Any

from attncore.quoted import MAX_PART, MOST, one_line, plain_text, quoted

INT32_MAX = 2**31 - 1
FLOAT_MAX = sys.float_info.max
_WHOLE_NUMBER = re.compile(r"[+-]?[0-9]{1,1000}")
FLOAT32_LEAST, FLOAT32_MAX = 2.0**-126, (2 - 2.0**-23) * 2.0**127
UNREADABLE = (TypeError, ValueError, OverflowError, NotImplementedError, MemoryError, SystemError)
"""What Python and NumPy raise where an object is not the list or array that it is read as.

A memoryview of two dimensions is a NotImplementedError, a released one a SystemError (CPython 3.11).
"""


def integer_or_none(value: Any) -> int | None:
    """``value`` as int where it is an integer of any library; None for a bool and for anything else."""
    try:
        return _to_int(value)
    except TypeError:
        return None


def integer(name: str, value: Any, least: int, most: int = INT32_MAX) -> int:
    """``value`` as int; TypeError where it is not an integer, ValueError outside ``least``..``most``."""
    try:
        number = _to_int(value)
    except TypeError as error:
        raise _not_an_integer(name, value, error) from error.__cause__
    if number < least:
        raise ValueError(f"{name}: {quoted(number)} is below {least}")
    if number > most:
        raise ValueError(
            f"{name}: {quoted(number)} " + ("does not fit int32" if most == INT32_MAX else f"exceeds {most}")
        )
    return number


def optional_integer(name: str, value: Any, least: int, most: int = INT32_MAX) -> int | None:
    """``integer`` of an argument that may be None, which stays None."""
    return None if value is None else integer(name, value, least, most)


def whole_number(text: str) -> int:
    """The integer that a text from outside states in ASCII digits, perhaps behind a sign; ValueError for any other.

    ``int`` takes ``1_0``, the digits of other scripts, and blanks around them.
    """
    if _WHOLE_NUMBER.fullmatch(text):
        return int(text)
    raise ValueError(f"{quoted(text)} is not a whole number")


def whole_number_of_63_bits(text: str) -> int:
    """``whole_number``; ValueError, too, where it has more than 63 bits."""
    number = whole_number(text)
    if number.bit_length() > 63:
        raise ValueError(f"{quoted(text)} has more than 63 bits")
    return number


def real_number(text: str) -> float:
    """The float that a text from outside states in ASCII, without blanks and underscores; ValueError for any other."""
    try:
        if text.isascii() and "_" not in text and not any(map(str.isspace, text)):
            return float(text)
    except ValueError:
        pass
    raise ValueError(f"{quoted(text)} is not a number")


def positive_integer(name: str, value: Any) -> int:
    """Checks a value of a declaration or a file: ``value`` as int; ValueError where it is no integer, or below 1."""
    number = integer_or_none(value)
    if number is None or number < 1:
        raise ValueError(f"{name}: {quoted(value)} is not a positive integer")
    return number


def finite_number(name: str, value: Any, *, positive: bool = False) -> int | float:
    """``value``: an int, a float, or what ``float`` makes of it; ValueError where that is not finite (or positive)."""
    number = None
    if type(value) is int or type(value) is float:
        number = value
    elif not isinstance(value, bool | str | bytes | bytearray | memoryview) and not is_no_real_number(value):
        try:
            number = float(value)
        except Exception:  # __float__ may be the caller's code
            number = None
    if number is None or not (0 if positive else -FLOAT_MAX) <= number <= FLOAT_MAX or (positive and not number):
        raise ValueError(f"{name}: {quoted(value)} is not a {'positive' if positive else 'finite'} number")
    return number


def is_no_real_number(value: Any) -> bool:
    """Whether an array's or a tensor's dtype says that it holds bools, complex numbers, times or texts.

    ``float`` takes a time as its count, a bool as 0 or 1, and leaves out the imaginary part.
    """
    dtype = getattr(value, "dtype", None)
    kind = getattr(dtype, "kind", None)  # torch's dtypes have none
    return kind in ("b", "c", "m", "M", "S", "U") if kind else str(dtype).startswith(("torch.bool", "torch.complex"))


def float32_number(name: str, value: Any, *, positive: bool = False) -> int | float:
    """``finite_number`` of float32, which kernels compute in: a larger one is infinite there, a cap below it 0."""
    number = finite_number(name, value, positive=positive)
    if not (FLOAT32_LEAST if positive else -FLOAT32_MAX) <= number <= FLOAT32_MAX:
        raise ValueError(f"{name}: {number} is outside the numbers of float32, in which attention is computed")
    return number


def flag(name: str, value: Any) -> bool:
    """``value`` as a bool; TypeError where it is neither a bool nor NumPy's: the text "no" is true to Python."""
    if value is True or value is False:
        return value
    if type(value).__module__ == "numpy" and getattr(value, "dtype", None) == "bool" and value.ndim == 0:
        return bool(value)
    raise TypeError(f"{name}: {quoted(value)} is not True or False")


def dtype(name: str, value: Any) -> Any:
    """``value`` as a NumPy dtype of this machine's byte order; TypeError where it is none, or None.

    NumPy itself takes None as float64. Imports NumPy.
    """
    import numpy as np

    # NumPy's refusal would quote all of an array's numbers, and of a collection's; the latter are dtypes of records.
    if value is None or isinstance(value, list | tuple | dict) or hasattr(type(value), "__array__"):
        raise TypeError(f"{name}: {quoted(value)} found; give a NumPy dtype, such as numpy.int64")
    try:
        return np.dtype(value).newbyteorder("=")
    except (*UNREADABLE, SyntaxError) as error:  # NumPy's reader of texts such as "i4,(" raises SyntaxError
        raise TypeError(f"{name}: {quoted(value)} is no NumPy dtype: {one_line(error, MAX_PART)}") from error


def one_of(name: str, value: Any, known: Iterable[str]) -> str:
    """``value`` as a plain str; ValueError where it is not one of ``known``."""
    word, words = plain_text(value), tuple(known)
    if word is None or word not in words:
        raise ValueError(f"{name}: {quoted(value)} is not one of {', '.join(words)}")
    return word


def name(path: str, value: Any) -> str:
    """``value`` as a plain str of at most MOST letters, which messages quote whole; TypeError where it is none, or
    empty, ValueError where it is longer.
    """
    found = plain_text(value)
    if not found:
        raise TypeError(f"{path}: {quoted(value)} is not a name")
    if len(found) > MOST:
        raise ValueError(f"{path}: a name of {len(found)} letters found; give one of {MOST} at most")
    return found


def items(name: str, values: Any, *, most: int | None = None) -> list[Any]:
    """``values`` as a list, read once and, where given, ``most`` of them; TypeError where they cannot be read."""
    if (why := why_no_list(values)) is not None:
        raise TypeError(f"{name}: {why}")
    try:
        return list(values if most is None else islice(values, most))
    except UNREADABLE as error:
        raise TypeError(
            f"{name}: {type(values).__name__} cannot be read as a list: {one_line(error, MAX_PART)}"
        ) from error


def tensor_type() -> Any:
    """The type of torch's tensors, for ``isinstance``; () where torch is not imported, or another thread that imports
    it has not come to them: there is no tensor then.
    """
    return getattr(sys.modules.get("torch"), "Tensor", ())


def why_no_list(values: Any) -> str | None:
    """Why an object that Python can read as a list is none of numbers; None where this says nothing against it.

    A set, which has no order, and a mapping, whose values would be lost; bytes, which Python reads as small integers; a
    NumPy record, whose parts are different things; a tensor that is nested or sparse, which torch refuses to read with
    a bare RuntimeError.
    """
    kind = type(values)
    if kind is list or kind is tuple:
        return None
    if isinstance(values, Mapping) or (isinstance(values, Set) and not isinstance(values, KeysView)):
        what = "keys and values" if isinstance(values, Mapping) else "no order"
        return f"{kind.__name__} found, which has {what}; give a list or an array of integers"
    if isinstance(values, bytes | bytearray):
        return f"{kind.__name__} found, which hold text; give a list or an array of integers"
    if isinstance(values, memoryview):
        return _why_no_view(values)
    numpy = sys.modules.get("numpy")
    if isinstance(values, getattr(numpy, "void", ())):
        return "a NumPy record found; give a list or an array of integers"
    if isinstance(values, tensor_type()):
        return _why_no_tensor(values, sys.modules["torch"].strided)
    return None


def _why_no_view(values: memoryview) -> str | None:
    try:
        of_bytes = values.format in ("B", "c")
    except ValueError as error:  # a released one has no format
        return f"memoryview cannot be read as a list: {one_line(error, MAX_PART)}"
    return "a memoryview of bytes found; give a list or an array of integers" if of_bytes else None


def _why_no_tensor(values: Any, strided: Any) -> str | None:
    if values.is_nested:
        return "a nested tensor found; give a strided one"
    return None if values.layout is strided else f"a tensor of layout {values.layout} found; give a strided one"


def own_items(values: Any) -> list[Any]:
    """What a list or a tuple holds, whatever a subclass says of its length and its items; [] of anything else."""
    if isinstance(values, list):
        return list(list.__iter__(values))
    return list(tuple.__iter__(values)) if isinstance(values, tuple) else []


def _to_int(value: Any) -> int:
    """``value`` as int; TypeError, caused by what its ``__index__`` raised, where it is no integer."""
    if type(value) is int:
        return value
    try:
        if not (isinstance(value, bool) or _is_of_bools(value) or getattr(value, "ndim", None)):
            return int.__index__(operator.index(value))  # a subclass of int becomes a plain one
    except TypeError:
        pass  # what operator.index says of an object that is no integer
    except Exception as error:  # __index__ may be the caller's code, and raises what it likes
        raise TypeError("no integer: its __index__ raised") from error
    raise TypeError("no integer")


def _is_of_bools(value: Any) -> bool:
    # bools of torch, and of NumPy 1, have an __index__; dtypes of NumPy have a kind
    dtype = getattr(value, "dtype", None)
    if dtype is None:
        return False
    kind = getattr(dtype, "kind", None)
    return "bool" in str(dtype) if kind is None else bool(kind == "b")


def _not_an_integer(name: str, value: Any, error: TypeError) -> TypeError:
    cause = error.__cause__
    why = "" if cause is None else f": its __index__ raised {type(cause).__name__}: {cause}"
    return TypeError(f"{name}: {quoted(value)} is not an integer{why}")


def check_value_size(head_size: int, head_size_v: int | None, num_kv_heads: int, use_mla: bool) -> None:
    """ValueError that names the field where sizes, checked integers, make no cache: a latent one has a single head,
    whose first ``head_size_v`` columns are the values.
    """
    if not use_mla:
        return
    if num_kv_heads != 1:
        raise ValueError(f"num_kv_heads: {num_kv_heads} found; a latent cache (use_mla) has one head, so give 1")
    if head_size_v is not None and head_size_v > head_size:
        raise ValueError(
            f"head_size_v: {head_size_v} found; with use_mla values are the first columns of the {head_size} of a "
            "latent row (head_size)"
        )
