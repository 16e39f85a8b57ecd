"""What a call came to: an answer, or a refusal that begins with the name of an argument."""

import re

import numpy as np
from fuzz.lying_objects import FromObject, Stop

from attncore.errors import AttncoreError

NAMED = re.compile(r"[\w -]+[\w.\[\]'-]*: ")

BROKEN = re.compile(
    r"too many values to unpack|__len__\(\) should return|index-sized integer|dictionary update sequence"
)
"""Python's own words for an object that breaks a protocol; a mapping whose items are no pairs, a length below 0."""
ADDRESS = re.compile(r"at 0x[0-9a-f]+")


def outcome(call, *args, **kwargs):
    """("answer", value), ("refused", type, text), ("stopped", type) where the object's own code raised, ("no memory",).

    Any other exception than those that the documents name, and an error that does not begin with a name, fails.
    """
    try:
        return "answer", call(*args, **kwargs)
    except (FromObject, Stop) as error:
        return "stopped", type(error)
    except MemoryError:
        return "no memory", None
    except (ValueError, TypeError, AttncoreError) as error:
        kind, text = type(error), str(error)
    if BROKEN.search(text):
        return "stopped", kind
    assert NAMED.match(text), f"the text of {kind.__name__}({text!r}) does not begin with an argument's name"
    return "refused", kind, ADDRESS.sub("at 0x", text)


def plain(value):
    """A value as what Python compares: arrays as their dtype, shape and bytes, and the same inside containers."""
    if isinstance(value, np.ndarray):
        return value.dtype.str, value.shape, value.tobytes()
    if isinstance(value, (list, tuple)):
        return type(value).__name__, [plain(one) for one in value]
    if isinstance(value, dict):
        return {key: plain(one) for key, one in value.items()}
    return value
