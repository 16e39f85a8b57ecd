"""Verify that a backend works on this machine: compare it with the reference, in a child process.

Without NAME the backend that would be chosen is verified, with --all every one that is loaded and can be used here. The
verdict is kept (by the plugin's version, the device and its driver) and shown again until --fresh verifies anew. Exits
with 0 where all agree, 1 where one differs, fails, crashes or hangs, 3 where none can be used here.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from attncore.cli.argument_types import add_choice, backend_name
from attncore.cli.installed_backends import check_installed
from attncore.cli.output import print_table
from attncore.cli.progress_bar import said_meanwhile
from attncore.command import check_current_folder, name_in_place_of
from attncore.errors import NoBackendError
from attncore.json_output import print_json
from attncore.quoted import one_line, quoted
from attncore.registry.choice.choice import Choice, choose
from attncore.registry.choice.negotiate_installed import negotiate_installed
from attncore.registry.choice.select import select
from attncore.registry.plugins.load import registry
from attncore.registry.plugins.option_argument import add_option_argument, options_of
from attncore.registry.spec.backend_spec import BackendSpec
from attncore.registry.spec.fitting_fields import fitting_fields
from attncore.show import counted
from attncore.standard_output import stdout_to_stderr
from attncore.terminal import print_lines
from attncore.vocabulary import DTYPES, KV_CACHE_DTYPES

if TYPE_CHECKING:
    from attncore.testing.verify import Verdict

_COUNTS = {
    "num_heads": "query heads",
    "num_kv_heads": "key/value heads",
    "head_size": "size of a head",
    "block_size": "tokens per block of the kernel",
    "sliding_window": "tokens a query may see, itself included",
}


def configure(parser: argparse.ArgumentParser) -> None:
    """The options of the command."""
    name_in_place_of(parser, backend="the argument NAME")
    parser.add_argument(
        "backend",
        type=backend_name,
        nargs="?",
        metavar="NAME",
        help="the backend (default: the one that would be chosen)",
    )
    parser.add_argument("--all", action="store_true", help="every backend that is loaded and can be used here")
    for name, text in _COUNTS.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, metavar="N", help=text)
    add_choice(parser, "--dtype", DTYPES, "of queries, keys and values")
    add_choice(parser, "--kv-cache-dtype", (*KV_CACHE_DTYPES, "fp8"), "of the cache")
    add_option_argument(parser, "NAME")
    parser.add_argument("--timeout", type=float, default=300.0, metavar="SECONDS", help="for each (default 300)")
    parser.add_argument("--fresh", action="store_true", help="verify anew, even where a verdict is kept")
    parser.add_argument("--json", action="store_true", help="print an array of verdicts as JSON")


def run(args: argparse.Namespace) -> int:
    """Print a row per backend; 1 where one does not agree."""
    from attncore.testing.verify import verify

    check_current_folder()
    if not 0 < args.timeout < float("inf"):
        raise ValueError(f"--timeout: {args.timeout:g} is not a positive number of seconds")
    if args.all and args.backend:
        raise ValueError(f"--all: given with NAME {quoted(args.backend)}; give one of them")
    with stdout_to_stderr():
        if args.backend:
            check_installed("NAME", args.backend)
        choices, left_out = _choices(args)
    verdicts = []
    for choice in choices:
        with said_meanwhile(f"verifying {one_line(choice.name)}"):
            verdicts.append(verify(choice, timeout=args.timeout, fresh=args.fresh))
    if args.json:
        print_json([verdict.as_json() for verdict in verdicts])
    else:
        rows = [
            (
                verdict.name,
                choice.candidate.variant_label or "-",
                f"{verdict.distribution} {verdict.version}",
                verdict.device,
                verdict.state,
                "-" if verdict.max_abs_error is None else f"{verdict.max_abs_error:.2g}",
                f"{verdict.seconds:.1f}" + (" (kept)" if verdict.cached else ""),
                (verdict.message or _compared(verdict))
                + (f"; what was kept is ignored: {verdict.ignored}" if verdict.ignored else ""),
            )
            for choice, verdict in zip(choices, verdicts, strict=True)
        ]
        print_table(("NAME", "VARIANT", "DISTRIBUTION", "DEVICE", "STATE", "ERROR", "SECONDS", "WHAT"), rows)
        if left_out:
            print_lines(f"not verified: {', '.join(map(one_line, left_out))}; attncore explain says why")
    return 0 if all(verdict.fine for verdict in verdicts) else 1


def _compared(verdict: Verdict) -> str:
    text = f"{counted(verdict.steps, 'step')} compared with {verdict.against}"
    return text if verdict.tolerance is None else f"{text}; allowed error: {verdict.tolerance:g} x (1 + abs(number))"


def _choices(args: argparse.Namespace) -> tuple[list[Choice], list[str]]:
    """The choices to verify, and the names of the loaded backends that cannot be used here, which --all leaves out."""
    given = {name: getattr(args, name) for name in (*_COUNTS, "dtype", "kv_cache_dtype")}
    given = {name: value for name, value in given.items() if value is not None}
    if options := options_of(args.backend, args.option, "NAME"):
        given["options"] = {args.backend: options}
    specs = {record.name: record.spec for record in registry().records if record.spec is not None}
    if not args.all:
        spec = specs.get(args.backend) if args.backend else None
        return [select(**_request(spec, given), backend=args.backend)], []
    found, left_out, refusals = [], [], ["no backend that is loaded can be used here"]
    for name, one in specs.items():
        negotiation = negotiate_installed(**_request(one, given), backend=name)
        if (choice := choose(negotiation)) is not None:
            found.append(choice)
        else:
            left_out.append(name)
            refusals += [f"{name}: {reason}" for reason in negotiation.rejected[0].reasons]  # the one named comes first
    if not found:
        raise NoBackendError("\n".join(refusals))
    return found, left_out


def _request(spec: BackendSpec | None, given: Mapping[str, Any]) -> dict[str, Any]:
    """What is given, over what fits the first variant that can then be used here; the first where none can."""
    if spec is None:
        return _filled_in(None, given)
    requests = [_filled_in(stated, given) for _, stated in spec.by_variant]
    fitting = (one for one in requests if choose(negotiate_installed(**one, backend=spec.name)) is not None)
    return next(fitting, requests[0])


def _filled_in(stated: BackendSpec | None, given: Mapping[str, Any]) -> dict[str, Any]:
    """What is given, over what ``_fields`` says; key/value heads as heads where its own number does not divide them."""
    fields = {**_fields(stated), **given}
    if "num_kv_heads" not in given and fields["num_heads"] % fields["num_kv_heads"]:
        fields["num_kv_heads"] = fields["num_heads"]
    return fields


def _fields(stated: BackendSpec | None) -> dict[str, Any]:
    """A request of common sizes; where a variant's spec does not declare one of them, of a size that it declares."""
    fields: dict[str, Any] = {"num_heads": 32, "num_kv_heads": 8, "head_size": 128, "dtype": "bfloat16"}
    if stated is None:
        return fields
    most = stated.max_group_size
    if most is not None and most < 4:
        fields["num_kv_heads"] = 32
    fields |= fitting_fields(stated)
    if fields.get("use_mla"):  # one latent head
        fields |= {"num_heads": min(32, most or 32), "num_kv_heads": 1}
    return fields
