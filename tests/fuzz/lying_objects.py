"""Objects that lie: they break what Python's protocols promise, or raise, or call the batch again when they are read.

Every object prints the same text each time, so that two errors can be compared.
"""

from collections.abc import Mapping


class FromObject(Exception):  # noqa: N818
    """What an object's own code raises."""


class Stop(BaseException):
    """What an object's own code raises, and no ``except Exception`` catches."""


class Index:
    """An integer by ``__index__``: its values one after another, the last one from then on. A class is raised."""

    def __init__(self, call, *values):
        self.call, self.values = call, list(values)

    def __index__(self):
        self.call()
        value = self.values.pop(0) if len(self.values) > 1 else self.values[0]
        if isinstance(value, type):
            raise value("__index__")
        return value

    def __repr__(self):
        return "Index"


class Compares(Index):
    """An integer that says it is inside every range, and equal to everything."""

    def __eq__(self, other):
        self.call()
        return True

    __lt__ = __le__ = __gt__ = __ge__ = __eq__

    def __hash__(self):
        return 0


class Int(int):
    """An int whose own methods say another value."""

    def __index__(self):
        return 2**40

    def __eq__(self, other):
        return True

    __lt__ = __le__ = __gt__ = __ge__ = __eq__

    def __hash__(self):
        return 0


class FakeBool:
    """Claims to be a bool, and is an index."""

    __class__ = bool

    def __index__(self):
        return 3

    def __bool__(self):
        raise FromObject("__bool__")

    def __repr__(self):
        return "FakeBool"


class Ids(list):
    """A list whose length is what it is told to be; ``length`` may be a class, which is raised."""

    def __init__(self, items, length):
        super().__init__(items)
        self.length = length

    def __len__(self):
        if isinstance(self.length, type):
            raise self.length("__len__")
        return self.length

    def __repr__(self):
        return "Ids"


class Items:
    """A sequence by ``__len__`` and ``__getitem__`` alone; what it yields may be more, less, or an error."""

    def __init__(self, call, length, items):
        self.call, self.length, self.items = call, length, items

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        self.call()
        item = self.items[index]
        if isinstance(item, type):
            raise item("__getitem__")
        return item

    def __repr__(self):
        return "Items"


class Once:
    """An iterator: it can be read only once, and has no length."""

    def __init__(self, items):
        self.items = items

    def __iter__(self):
        return self

    def __next__(self):
        if not self.items:
            raise StopIteration
        return self.items.pop(0)

    def __repr__(self):
        return "Once"


class AsArray:
    """An array by ``__array__``, whose answer may be another kind of object, or an error."""

    def __init__(self, call, answer):
        self.call, self.answer = call, answer

    def __len__(self):
        return 1

    def __iter__(self):
        return iter([1])

    def __array__(self, dtype=None, copy=None):
        self.call()
        if isinstance(self.answer, type):
            raise self.answer("__array__")
        return self.answer

    def __repr__(self):
        return "AsArray"


class Pairs(Mapping):
    """A mapping whose ``items`` are what it is told; a class is raised."""

    def __init__(self, call, items, length=1):
        self.call, self.pairs, self.length = call, items, length

    def __len__(self):
        return self.length

    def __iter__(self):
        return iter([pair[0] for pair in self.pairs])

    def __getitem__(self, key):
        self.call()
        raise FromObject("__getitem__")

    def items(self):
        self.call()
        if isinstance(self.pairs, type):
            raise self.pairs("items")
        return self.pairs

    def __repr__(self):
        return "Pairs"


class Name:
    """A request's name whose hash or equality fails, or changes from call to call."""

    def __init__(self, hashes=(1,), equal=True):
        self.hashes, self.equal = list(hashes), equal

    def __hash__(self):
        value = self.hashes.pop(0) if len(self.hashes) > 1 else self.hashes[0]
        if isinstance(value, type):
            raise value("__hash__")
        return value

    def __eq__(self, other):
        if isinstance(self.equal, type):
            raise self.equal("__eq__")
        return self.equal

    def __repr__(self):
        return "Name"


def shrinking(call, count):
    """A list of ids, one of which empties it when it is read."""
    ids = [1] * count

    def empty():
        call()
        ids.clear()

    ids[count // 2] = Index(empty, 1)
    return ids


def growing(call, count):
    """A list of ids, one of which makes it longer when it is first read."""
    ids = [1] * count

    def extend():
        call()
        ids[count:] = [1] * 1000

    ids[0] = Index(extend, 1)
    return ids


def released():
    view = memoryview(bytearray(8)).cast("i")
    view.release()
    return view
