"""docs/command-line.md, environment.md and limits.md: what the parsers, variables and constants of the code say.

``python tests/reference_pages.py --write`` puts them there.
"""

import argparse
import pathlib
import pkgutil
import re
import sys
import textwrap

from attncore import cli, env
from attncore.registry.plugins.load import registry

DOCS = pathlib.Path(__file__).parent.parent / "docs"
BLOCK = re.compile(r"(<!-- (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)
PLUGINS = ("flash", "flashinfer", "rocm")


def rendered(text):
    """A page's text with each of its blocks as the code has it."""
    return BLOCK.sub(lambda match: f"{match[1]}{BLOCKS[match[2]]()}\n{match[3]}", text)


def commands():
    return "\n\n".join(command(f"attncore {name}", cli._parser(name)) for name in cli.COMMANDS)


def command(title, parser):
    """A section for a command: its usage, its description, a table of its arguments and options."""
    usage = parser.format_usage().removeprefix("usage: ").strip()
    rows = [f"| {words(one)} | {cell(parser, one)} |" for one in parser._actions if one.help != argparse.SUPPRESS]
    table = ["| argument, option | meaning |", "|---|---|", *(row for row in rows if "`--help`" not in row)]
    return "\n\n".join([f"## {title}", f"    {usage}", prose(parser.description), "\n".join(table)])


def words(action):
    """``-k EXPRESSION``, as it is typed; several names of one option are alternatives."""
    value = "" if action.nargs == 0 else f" {metavar(action)}" if action.option_strings else metavar(action)
    return ", ".join(f"`{name}{value}`" for name in action.option_strings) or f"`{value}`"


def metavar(action):
    if action.metavar:
        return action.metavar if isinstance(action.metavar, str) else " ".join(action.metavar)
    return "{" + ",".join(map(str, action.choices)) + "}" if action.choices else action.dest.upper()


def cell(parser, action):
    text = " ".join(parser._get_formatter()._expand_help(action).split()) if action.help else ""
    return escaped(text)


def prose(text):
    parts = (escaped(" ".join(part.split())) for part in text.strip().split("\n\n"))
    return "\n\n".join(textwrap.fill(part, 120, break_long_words=False, break_on_hyphens=False) for part in parts)


def escaped(text):
    """Text of a terminal as Markdown; what stands in backticks is code in both."""
    parts = text.split("`")
    parts[::2] = [re.sub(r"([|<>*\[\]])", r"\\\1", part) for part in parts[::2]]
    parts[1::2] = [part.replace("|", r"\|") for part in parts[1::2]]
    return "`".join(parts)


LIMITS = {
    "KV-cache groups of a batch": "attncore.builder.persistent.kv_cache_group.MAX_GROUPS",
    "groups of states of a batch": "attncore.builder.persistent.state_group.MOST_STATE_GROUPS",
    "columns of a builder, with a column for each group of states": (
        "attncore.builder.persistent.engine_fields.MOST_COLUMNS"
    ),
    "tokens for which a host function makes arrays": "attncore.array_arguments.MOST_TOKENS",
    "block ids of a table that it makes": "attncore.array_arguments.MOST_BLOCKS",
    "entries of a collection in a backend's spec": "attncore.registry.spec.plain_values.MAX_ENTRIES",
    "sizes in a set of sizes of a spec": "attncore.registry.spec.plain_values.MAX_SIZES",
    "letters of a text of a spec": "attncore.registry.spec.plain_values.MAX_LETTERS",
    "bytes of a model's `config.json`": "attncore.registry.config_json.MAX_BYTES",
    "levels of a model's `config.json`": "attncore.registry.config_json.MAX_DEPTH",
    "requests of a trace": "attncore.replay.traces.read_trace.MAX_REQUESTS",
    "bytes of a line of a trace": "attncore.replay.traces.read_trace.MAX_LINE",
    "bytes of a trace": "attncore.replay.traces.read_trace.MAX_BYTES",
    "layers of a model that is replayed": "attncore.replay.layers.model_from_config.MAX_LAYERS",
    "bytes of a file of steps for `attncore bench`": "attncore.testing.engines.saved_steps.MAX_BYTES",
    "steps of such a file": "attncore.testing.engines.saved_steps.MAX_STEPS",
}
"""What the limits page lists, and the constant that holds each."""


def limits():
    rows = [f"| {what} | {int(pkgutil.resolve_name(where)):,} |" for what, where in LIMITS.items()]
    return "\n".join(["| of | at most |", "|---|---|", *rows])


def core():
    return variables(env.VARIABLES)


def plugins():
    """The variables that the specs of this repository's plugins declare."""
    specs = {record.name: record.spec for record in registry().records if record.name in PLUGINS}
    return variables({name: text for spec in specs.values() for name, text in spec.variables.items()})


def variables(texts):
    return "\n".join(
        ["| variable | meaning |", "|---|---|", *(f"| `{name}` | {escaped(what)} |" for name, what in texts.items())]
    )


BLOCKS = {"commands": commands, "limits": limits, "core": core, "plugins": plugins}
PAGES = [DOCS / "command-line.md", DOCS / "environment.md", DOCS / "limits.md"]

if __name__ == "__main__":
    for page in PAGES:
        text = rendered(page.read_text())
        if sys.argv[1:] == ["--write"]:
            page.write_text(text)
        else:
            print(text)
