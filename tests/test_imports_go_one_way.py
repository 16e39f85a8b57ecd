"""Imports of attncore go one way: from a layer to those below it, and never in a circle.

Every import counts: at the top of a module, inside a function, or under TYPE_CHECKING. ``from attncore import Name``
counts as an import of the module that defines the name.
"""

from pathlib import Path

import pytest
from import_graph import circles, import_graph

import attncore

LAYERS = {
    "": (
        "cli __main__",
        "versions",
        "json_lines replay testing integrations",
        "ranks",
        "registry reference dense merge",
        "abstract ops",
        "builder",
        "graphs kernels slots _slots _slots_numba",
        "array_arguments",
        "written_file",
        "command",
        "process_end",
        "arguments chart_page how_to_install input_files json_output kept_files search_path standard_output terminal "
        "interrupts collector vocabulary env errors show deprecated",
        "broken_json frozen_map step_arrays did_you_mean logged palette temporary_folder installed_metadata "
        "same_readers running_call _version",
        "quoted",
    ),
    "builder": (
        "persistent lists adopted",
        "device blocks",
        "received_metadata first_generation_fields metadata slices device_slices first_generation_names needed_fields "
        "rank_drafts "
        "uncopied",
        "grid show",
        "read_only reused checked_backend",
        "fields",
    ),
    "registry": (
        "doctor",
        "choice",
        "plugins",
        "spec",
        "host request_from_config_json",
        "request request_fields",
        "reasons",
        "device_patterns package_requirements child_process config_json",
    ),
}
"""What stands in each folder, from the top layer down. A module imports from its own layer and from those below it.
"""

STRANGERS = (("builder.persistent", "builder.lists"), ("builder.adopted", "builder.lists"))
"""Folders of one layer that do not import each other."""


def layer(folder, name):
    """The number of the layer of ``name`` in ``folder``, counted from the top."""
    numbers = [number for number, names in enumerate(LAYERS[folder]) if name in names.split()]
    assert len(numbers) == 1, f"{folder or 'attncore'}: {name} stands in {len(numbers)} layers; put it in one of LAYERS"
    return numbers[0]


def complaint(importer, imported):
    """Why ``importer`` may not import ``imported``; None where it may. Names are without the package's."""
    for pair in STRANGERS:
        sides = {side for side in pair for name in (importer, imported) if f"{name}.".startswith(f"{side}.")}
        if len(sides) == 2:
            return f"{importer} imports {imported}: neither of {' and '.join(pair)} imports the other"
    ours, theirs, folder = importer.split("."), imported.split("."), ""
    while ours and theirs and folder in LAYERS:
        if layer(folder, ours[0]) > layer(folder, theirs[0]):
            return f"{importer} imports {imported}, which is in a layer above it"
        if ours[0] != theirs[0]:
            break
        folder, ours, theirs = f"{folder}.{ours[0]}".lstrip("."), ours[1:], theirs[1:]
    return None


def complaints(graph):
    return [
        text
        for importer, found in graph.items()
        for imported in found
        if (text := complaint(importer.partition(".")[2], imported.partition(".")[2]))
    ]


@pytest.fixture(scope="module")
def graph():
    return import_graph("attncore", Path(attncore.__file__).parent, attncore._HOME)


def test_no_import_goes_up(graph):
    found = complaints(graph)
    assert not found, "\n".join(found)


def test_no_circle(graph):
    found = circles(graph)
    assert not found, "\n".join(" <-> ".join(circle) for circle in found)


def test_every_module_has_a_layer(graph):
    for module in graph:
        parts, folder = module.split(".")[1:], ""
        while parts and folder in LAYERS:
            layer(folder, parts[0])
            folder, parts = f"{folder}.{parts[0]}".lstrip("."), parts[1:]


PLANTED = {
    "at the top": "from attncore.registry.choice.select import select",
    "of a public name": "from attncore import select",
    "of a public name as an attribute": "import attncore\nattncore.select",
    "inside a function": "def f():\n    from attncore import select",
    "for annotations": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from attncore import select",
    "relative": "from ..registry.choice import select",
}


def planted(tmp_path, sources):
    """The graph of a package with these modules and nothing else."""
    for name, source in sources.items():
        path = tmp_path / f"{name.replace('.', '/')}.py"
        for folder in (path.parent, *path.parent.parents):
            if folder == tmp_path.parent:
                break
            folder.mkdir(parents=True, exist_ok=True)
            (folder / "__init__.py").touch()
        path.write_text(source)
    return import_graph("attncore", tmp_path, attncore._HOME)


@pytest.mark.parametrize("source", PLANTED.values(), ids=PLANTED.keys())
def test_a_planted_import_upwards_is_found(tmp_path, source):
    graph = planted(tmp_path, {"builder.metadata": source, "registry.choice.select": ""})
    text = "builder.metadata imports registry.choice.select, which is in a layer above it"
    assert complaints(graph) == [text]


def test_an_import_between_strangers_is_found(tmp_path):
    source = "from attncore.builder.lists.builder import CommonMetadataBuilder"
    graph = planted(tmp_path, {"builder.persistent.builder": source, "builder.lists.builder": ""})
    assert len(complaints(graph)) == 1


def test_a_planted_circle_is_found(tmp_path):
    sources = {
        "env": "from attncore.errors import AttncoreError",
        "errors": "def f():\n    from attncore.vocabulary import STATES",
        "vocabulary": "from attncore import env",
        "arguments": "from attncore import env",
    }
    graph = planted(tmp_path, sources)
    assert complaints(graph) == []
    assert circles(graph) == [["attncore.env", "attncore.errors", "attncore.vocabulary"]]
