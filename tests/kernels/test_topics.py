"""attncore/kernels/cython and attncore/kernels/numba have the same topics, functions, classes and methods.

The sources are read, not imported: a name that one side lacks fails here even where nothing calls it. EXCEPTIONS says
what one side has alone and why; an entry that no longer is one fails too.
"""

import ast
import re
from pathlib import Path

import pytest

import attncore.kernels
from attncore.kernels.numba import sequence_checks

KERNELS = Path(attncore.kernels.__file__).parent
STRUCT = "a C struct; a Struct of the numba side's is no class, or its loop takes arrays and returns tuples"
PART = "a part of a loop, whose whole would be long"
FIELD = "a field in C"
NO_STEP = "a method in C runs whole; in Python a signal's handler may run in the middle, and a roll-back begin anew"
BUFFER = "the memory of an array, by the buffer protocol; the numba side reads arrays by NumPy"
OBJECT = "objects are read in a loop, which has no macros of CPython's"
EXCEPTIONS = {
    "types": "C types",
    "sent_steps": "one call in C; the numba side serves no device, and its steps take the longer way",
    "sequence_slots": "one call in C for what is plain; the numba side takes the longer way",
    "appended_blocks": "one call in C for what is plain; the numba side takes the longer way",
    "rolled_back": "one call in C for what is plain; the numba side takes the longer way",
    "known_steps": "one call in C; the numba side searches each step",
    "dlpack_tensors": "torch's own functions in C, of which Python has none",
    "codes": "attncore/kernels/codes.py for C; the numba side imports that",
    "sent_ahead": "the same",
    "jit": "how numba compiles",
    "memory": "structs and pointers, which C has",
    "objects": OBJECT,
    "library": "how numba is imported",
    "block_ids.read_small_int": "CPython's layout of an int",
    "block_ids.read_other_int": "what is no small int; the numba side has one way for all",
    "block_ids.is_aligned": BUFFER,
    "block_ids.open_array": BUFFER,
    "block_ids.copy_ids": BUFFER,
    "sequence_groups.GroupReader._read_array": BUFFER,
    "sequence_groups.GroupReader._told_apart": "a method in C; the numba side's are_told_apart, and a set in Python",
    "sequence_groups.read_array": "the numba side of that: the layout of NumPy's arrays",
    "slots.BlockSize": STRUCT,
    "slots.block_size_of": "makes a BlockSize",
    "slots.shift_of": "what BlockSize holds",
    "block_table.TableView": STRUCT,
    "block_table.TableState.follow": "the address of an array in a struct, which C writes there itself",
    "checks.Failure": STRUCT,
    "context_parallel.Ranks": STRUCT,
    "columns.ColumnOut": STRUCT,
    "columns.ColumnView": STRUCT,
    "columns.copy_items": "memcpy and memset",
    "sequence_fields.copy_lengths": "memcpy",
    "encoders.has_encoder": "asked by is_steady too",
    "adopted_rows.AdoptedCounts": STRUCT,
    "adopted_rows.count_step": PART,
    "adopted_rows.AdoptedRows.count_copies": PART,
    "adopted_rows.AdoptedRows.fill_copies": PART,
    "adopted_rows.AdoptedRows.fill_counted": "of steps that KnownSteps has counted",
    "checks.stale_rows": "SSE2",
    "one_token_rows.prefix_sum": "SSE2",
    "step_arena.lengths_of": "a pointer to an array",
    "step_arena.slots_of": "a pointer to an array",
    "step_sender.store_word": "an atomic store; NumPy has none, and the numba side serves no device",
    "step_sender.load_word": "an atomic load, the same",
    "step_sender.words_at": "memory at an address, for which C has a cast",
    "entrance.after_fork": "running_call.py does it",
    "entrance.lives_on": "a part of RunningCall.lasts",
    "entrance.settle_forked": "RunningCall.lasts is asked anew each time",
    "entrance.begin": "what a direct call does; those of the numba side enter",
    "batch.BatchState._restored": NO_STEP,
    "batch.BatchState.req_ids": FIELD,
    "step_arena.StepArena.req_ids": FIELD,
    "step_arena.StepArena.moves": FIELD,
    "step_arena.group_at": "an element of an array of structs",
    "step_arena._forget": "a loop; the arena's method in C",
    "step_arena.StepArena._forget": "the same",
    "step.steady_step": NO_STEP,
    "step.any_step": NO_STEP,
    "step.longest_decode": NO_STEP,
    "step.go_back": NO_STEP,
    "step.is_steady": "in C every step of decodes alone is one call",
    "step.holds_decodes": PART,
    "step.write_step": PART,
    "step.write_counts": PART,
    "step.note_ran": PART,
    "step.ran_at": PART,
    "sequence_checks.Entry": STRUCT,
    "sequence_checks.GroupTotals": STRUCT,
    "sequence_groups.GroupReader._reserve_entries": "realloc; NumPy allocates",
    "sequence_groups.GroupReader._reserve_ids": "realloc; NumPy allocates",
    "sequence_groups.GroupReader._read_in_one": OBJECT,
    "sequence_groups.GroupReader._read_into": OBJECT,
    "sequence_groups.GroupReader._read_objects": OBJECT,
    "sequence_groups.read_groups": OBJECT,
    "sequence_groups.read_group": OBJECT,
    "sequence_groups.read_sequence": OBJECT,
    "sequence_groups.read_table": OBJECT,
    "sequence_groups.are_told_apart": OBJECT,
    "sequence_groups.items_of": OBJECT,
    "sequence_groups.item_of": OBJECT,
    "sequence_groups.size_of": OBJECT,
}

CYTHON_NAME = re.compile(
    r"""
    ^(?P<indent>\ *)(?:
        cdef\ (?P<type>class|struct)\ (?P<type_name>\w+)
      | (?:cdef|cpdef|def)\ (?:[\w*]+\ )*(?P<function>\w+)\(
      | (?!cdef|def|cpdef)[\w\ *]+\ (?P<extern>\w+)\ "\w+"\(
    )""",
    re.MULTILINE | re.VERBOSE,
)


def cython_names(source):
    """Names of a .pxi: functions, structs, classes, and methods as Class.method; without double underscores."""
    names, owner = set(), None
    for found in CYTHON_NAME.finditer(source):
        if found["type_name"]:
            owner = found["type_name"]
            names.add(owner)
        elif found["extern"]:
            names.add(found["extern"])
        elif not found["function"].startswith("__") and len(found["indent"]) in (0, 4):
            names.add(f"{owner}.{found['function']}" if found["indent"] else found["function"])
    return names


def python_names(source):
    """The same of a .py."""
    names = set()
    for node in ast.parse(source).body:
        if isinstance(node, ast.FunctionDef):
            names.add(node.name)
        elif isinstance(node, ast.ClassDef):
            names.add(node.name)
            names |= {f"{node.name}.{one.name}" for one in node.body if isinstance(one, ast.FunctionDef)}
    return {name for name in names if "__" not in name}


def all_names(folder, suffix, names_of):
    """Topics, and names as topic.name."""
    names = set()
    for path in (KERNELS / folder).glob(f"*.{suffix}"):
        if path.stem != "__init__":
            names |= {path.stem, *(f"{path.stem}.{name}" for name in names_of(path.read_text()))}
    return names


def differences(cython, numba):
    """Names that one side has alone without an exception (a topic covers its names), and exceptions that are none."""
    alone = cython ^ numba
    unexpected = {name for name in alone if name not in EXCEPTIONS and name.split(".")[0] not in EXCEPTIONS}
    return unexpected, set(EXCEPTIONS) - alone


def both_sides():
    return all_names("cython", "pxi", cython_names), all_names("numba", "py", python_names)


def test_both_sides_have_the_same_names():
    assert differences(*both_sides()) == (set(), set())


@pytest.mark.parametrize(
    "name", ["padding.pad_step", "block_table.TableState.truncate", "context_parallel", "block_ids.read_int"]
)
@pytest.mark.parametrize("side", [0, 1])
def test_a_name_that_one_side_lacks_is_found(name, side):
    sides = both_sides()
    sides[side].remove(name)
    assert differences(*sides) == ({name}, set())


def test_an_exception_that_is_none_any_more_is_found():
    cython, numba = both_sides()
    assert differences(cython, numba | {"one_token_rows.prefix_sum"}) == (set(), {"one_token_rows.prefix_sum"})


def test_the_sources_are_understood():
    cython, numba = both_sides()
    assert len(cython & numba) > 100
    assert {
        "step.StepKernel._run",
        "step.StepKernel.decode_step_inside",
        "step_sender.store_word",
        "field_functions.classify",
    } <= cython
    names = cython_names("cdef class A:\n    cdef inline int* f(self, int x):\n        g(x)\n\n\ncdef B* h(int a):\n")
    assert names == {"A", "A.f", "h"}


def test_every_topic_is_included():
    included = re.findall(r'^include "kernels/cython/(\w+)\.pxi"$', (KERNELS.parent / "_slots.pyx").read_text(), re.M)
    assert sorted(included) == sorted(path.stem for path in (KERNELS / "cython").glob("*.pxi"))


def test_an_entry_has_the_columns_of_the_c_struct():
    struct = re.search(r"cdef struct Entry:\n((?:    .*\n)+)", (KERNELS / "cython/sequence_checks.pxi").read_text())[1]
    fields = re.findall(r"^    \w+ (\w+)", struct, re.M)
    assert [getattr(sequence_checks, name.upper()) for name in fields] == list(range(sequence_checks.ENTRY_COLUMNS))


@pytest.mark.parametrize(
    "magic",
    [
        r"\b(?:state|values|header|entry)\[\d+[],]",  # a row of a state, a word of a header, a column of an entry
        r"\bentries\[[^\]]*, *\d",
        r"slot\w*\[[^\]]*\] = -1",  # a padded slot
    ],
)
def test_no_row_or_word_is_a_bare_number(magic):
    for path in (*KERNELS.glob("cython/*.pxi"), *KERNELS.glob("numba/*.py")):
        assert not re.search(magic, path.read_text()), path.name


def test_no_topic_replaces_attributes_behind_pythons_back():
    """CPython 3.13.0 keeps attributes in the object itself, and what puts a dict beside them leaves them in force.

    A step had the numbers of another then. `__dict__` is set as Python code sets it.
    """
    for path in (KERNELS.parent / "_slots.pyx", *KERNELS.glob("cython/*")):
        code = re.sub(r"#.*", "", path.read_text())
        assert not re.search(r"PyObject_GenericSetDict|_PyObject_GetDictPtr", code), path.name
