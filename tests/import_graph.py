"""What each module of a package imports, read from its source: at the top, inside functions, and for annotations."""

import ast


def module_names(package, root):
    """Path of each module below ``root`` -> its dotted name; that of an ``__init__`` is the folder's."""
    names = {}
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root).with_suffix("").parts
        names[path] = ".".join((package, *(parts[:-1] if parts[-1] == "__init__" else parts)))
    return names


def import_graph(package, root, homes):
    """Module -> the modules of the package that it imports, in whatever place.

    ``homes`` maps names that the package itself offers to the modules that define them; the package's own ``__init__``
    has no row.
    """
    names = module_names(package, root)
    known = set(names.values())
    graph = {}
    for path, module in names.items():
        if module == package:
            continue
        base = module if path.name == "__init__.py" else module.rpartition(".")[0]
        found = {_home(name, package, known, homes) for name in _imported(ast.parse(path.read_text()), base, package)}
        graph[module] = sorted(found - {module, None})
    return graph


def _imported(tree, base, package):
    """The dotted names that a module imports: ``package.module.Name`` for ``from package.module import Name``."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parents = base.split(".")[: len(base.split(".")) + 1 - node.level] if node.level else []
            origin = ".".join((*parents, *([node.module] if node.module else [])))
            yield from (f"{origin}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == package:
            yield f"{package}.{node.attr}"  # after `import package`


def _home(name, package, known, homes):
    """The module of the package that a dotted name belongs to; None for names of others and the package alone."""
    if not name.startswith(f"{package}."):
        return None
    first = name.removeprefix(f"{package}.").partition(".")[0]
    if first in homes and f"{package}.{first}" not in known:
        return homes[first]
    while name not in known:
        name = name.rpartition(".")[0]
    return None if name == package else name


def circles(graph):
    """The sets of modules that import each other, directly or through others (Tarjan's components of two or more)."""
    index, low, stack, found = {}, {}, [], []

    def visit(module):
        index[module] = low[module] = len(index)
        stack.append(module)
        for other in graph.get(module, ()):
            if other not in index:
                visit(other)
                low[module] = min(low[module], low[other])
            elif other in stack:
                low[module] = min(low[module], index[other])
        if low[module] == index[module]:
            component = set()
            while module not in component:
                component.add(stack.pop())
            if len(component) > 1:
                found.append(sorted(component))

    for module in graph:
        if module not in index:
            visit(module)
    return sorted(found)
