"""Explain which backend would be chosen for a model on a machine, and give every reason against the others.

The model comes from options or from a Hugging Face config.json (options win); without either a common one is taken and
printed. The machine is this one, or any that --assume names; --assume-package states what is installed there.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from attncore.cli.argument_types import add_choice, backend_name, backend_names
from attncore.cli.installed_backends import not_installed
from attncore.command import UsageError, name_in_place_of
from attncore.did_you_mean import close_name, did_you_mean
from attncore.json_output import print_json
from attncore.quoted import quoted
from attncore.registry import package_requirements
from attncore.registry.choice.candidates import Candidate
from attncore.registry.choice.choice import Choice, choose
from attncore.registry.choice.explain import explain
from attncore.registry.choice.negotiate import Negotiation
from attncore.registry.choice.negotiate_installed import negotiate_installed, negotiate_installed_joint
from attncore.registry.choice.negotiate_prefill_decode import JointNegotiation
from attncore.registry.choice.prefill_decode_choice import JointChoice, choose_joint
from attncore.registry.config_json import read_config
from attncore.registry.host.host import Host
from attncore.registry.plugins.known_backends import KNOWN
from attncore.registry.plugins.load import registry
from attncore.registry.plugins.option_argument import add_option_argument, options_of
from attncore.registry.request_from_config_json import in_words_of_config, request_fields
from attncore.registry.spec.facts import plain_facts
from attncore.standard_output import stdout_to_stderr
from attncore.terminal import print_lines
from attncore.vocabulary import (
    DTYPES,
    FEATURES,
    GRAPH_LEVELS,
    KV_CACHE_DTYPES,
    KV_CACHE_LAYOUTS,
    PHASES,
    POLICIES,
)

_COUNTS = (
    ("num_heads", "query heads of one rank"),
    ("num_kv_heads", "key/value heads of one rank"),
    ("head_size", "size of a head"),
    ("head_size_v", "size of a value head where it differs"),
    ("block_size", "tokens per block of the kernel, exactly"),
    ("manager_block_size", "tokens per block of the engine's allocator"),
    ("max_model_len", "tokens of the longest sequence"),
    ("num_blocks", "blocks in the cache"),
    ("sliding_window", "tokens a query may see, itself included"),
)
_WORDS = (
    ("dtype", DTYPES, "of queries, keys and values"),
    ("kv_cache_dtype", (*KV_CACHE_DTYPES, "fp8"), "of the cache"),
    ("kv_cache_layout", KV_CACHE_LAYOUTS, "tokens before heads, heads before tokens, or the backend's own"),
    ("cuda_graph", GRAPH_LEVELS, "the steps that the engine captures"),
    ("phase", PHASES, "the only phase that the backend runs"),
    ("policy", POLICIES, "where --backend cannot be used, choose none or another"),
)
_COMMON = {"num_heads": 32, "num_kv_heads": 8, "head_size": 128, "dtype": "bfloat16"}
_NO_BFLOAT16 = ("sm_70", "sm_72", "sm_75")
"""NVIDIA GPUs that do not compute in it: models run in float16 there."""


def configure(parser: argparse.ArgumentParser) -> None:
    """The options of the command."""
    name_in_place_of(parser, device="--assume DEVICE", model="--config FILE")
    model = parser.add_argument_group("the request")
    model.add_argument("--config", metavar="FILE", help="a Hugging Face config.json, or the folder that holds one")
    model.add_argument(
        "--tensor-parallel", type=int, default=1, metavar="N", help="ranks that share the heads of --config"
    )
    for name, text in _COUNTS:
        model.add_argument(_flag(name), type=int, metavar="N", help=text)
    for name, choices, text in _WORDS:
        add_choice(model, _flag(name), choices, text)
    model.add_argument("--logits-soft-cap", type=float, metavar="X", help="scores are bounded to X, by tanh")
    model.add_argument(
        "--alibi",
        nargs="?",
        const=True,
        choices=("standard",),
        metavar="standard",
        help="position biases; 'standard' slopes only",
    )
    model.add_argument("--sinks", action="store_true", default=None, help=FEATURES["sinks"])
    model.add_argument(
        "--strided-kv-cache",
        action="store_true",
        default=None,
        help="the engine hands over the cache as a pair of views, with strides of its own",
    )
    model.add_argument("--use-mla", action="store_true", default=None, help="latent attention")
    model.add_argument(
        "--feature",
        dest="features",
        action="append",
        choices=tuple(FEATURES),
        metavar="NAME",
        help=f"what is needed beyond these options, once for each: {', '.join(FEATURES)}",
    )
    model.add_argument(
        "--no-compile", dest="allow_compile", action="store_false", default=None, help="no kernels compiled at run time"
    )
    model.add_argument("--backend", type=backend_name, metavar="NAME", help="the backend to use")
    add_option_argument(model, "--backend")
    model.add_argument(
        "--prefer", type=backend_names, metavar="A,B", help="backends to use where they can be, in this order"
    )
    model.add_argument("--exclude", type=backend_names, metavar="A,B", help="backends not to use")
    parser.add_argument("--joint", action="store_true", help="choose for prefill and for decode together")
    parser.add_argument(
        "--assume",
        dest="device",  # as errors of Host.assume name it
        metavar="DEVICE",
        help="the machine to choose for, such as sm_90 (an H100), gfx942 (an MI300X), cpu (default: this one)",
    )
    parser.add_argument(
        "--assume-package",
        action="append",
        default=[],
        metavar="NAME==VERSION",
        help="what is installed there; NAME== says that it is not; may be given several times",
    )
    parser.add_argument(
        "--verbose", action="store_true", help="also print the metadata that the chosen backend reads in a step"
    )
    parser.add_argument("--json", action="store_true", help="print the request, the host and every candidate as JSON")


def run(args: argparse.Namespace) -> int:
    """Print the negotiation; 3 where no backend can be used."""
    host = _host(args)
    fields = _fields(args, host)
    negotiation: Negotiation | JointNegotiation
    choice: Choice | JointChoice | None
    with stdout_to_stderr(), _naming_config(args):
        _tell_of_strange_packages(args.assume_package)
        if options := options_of(args.backend, args.option, "--backend"):
            fields["options"] = {args.backend: options}
        if args.joint:
            negotiation = negotiate_installed_joint(host=host, **fields)
            choice = choose_joint(negotiation)
        else:
            negotiation = negotiate_installed(host=host, **fields)
            choice = choose(negotiation)
        _tell_of_strange_backends(args.prefer or (), args.exclude or ())
        _tell_of_contradictions(args.backend, args.prefer or (), args.exclude or ())
    if args.json:
        print_json(_as_json(negotiation, choice))
    else:
        _print(negotiation, choice, verbose=args.verbose)
        if args.device not in (None, "cpu"):
            _tell_what_an_assumed_machine_has(negotiation, args.device)
    return 0 if choice is not None else 3


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _fields(args: argparse.Namespace, host: Host) -> dict[str, Any]:
    names = [name for name, *_ in (*_COUNTS, *_WORDS)]
    names += [
        "logits_soft_cap",
        "alibi",
        "sinks",
        "strided_kv_cache",
        "use_mla",
        "features",
        "allow_compile",
        "backend",
        "prefer",
        "exclude",
    ]
    given = {name: getattr(args, name) for name in names if getattr(args, name) is not None}
    if args.config:
        return {**_fields_of_config(args, given), **given}
    if args.tensor_parallel != 1:
        raise ValueError("--tensor-parallel: only with --config; --num-heads are those of one rank already")
    if "use_mla" in given:
        given.setdefault("num_kv_heads", 1)
    if "num_heads" in given:
        given.setdefault("num_kv_heads", given["num_heads"])
    common = _COMMON if host.arch not in _NO_BFLOAT16 else {**_COMMON, "dtype": "float16"}
    fields = {**common, **given}
    vars(args).update(fields)  # those left open are filled in
    return fields


def _fields_of_config(args: argparse.Namespace, given: dict[str, Any]) -> dict[str, Any]:
    try:
        config = read_config(args.config)
    except ValueError as error:
        raise UsageError(f"--config: {error}") from None
    try:
        return request_fields(config, tensor_parallel=args.tensor_parallel, given=given)
    except ValueError as error:
        if not str(error).startswith("config: "):
            raise
        raise UsageError(f"--config: {args.config}: {str(error).removeprefix('config: ')}") from None


@contextlib.contextmanager
def _naming_config(args: argparse.Namespace) -> Iterator[None]:
    """Has an error of a field that no option gave name the file of --config, where there is one."""
    try:
        yield
    except (ValueError, TypeError) as error:
        if not args.config:
            raise
        config, text = read_config(args.config), str(error)
        names = (*(name for name, *_ in (*_COUNTS, *_WORDS)), "logits_soft_cap")
        options = {name: _flag(name) for name in names if getattr(args, name) is not None}
        if vars(args).get(text.partition(":")[0], error) is None:
            raise UsageError(f"--config: {args.config}: {in_words_of_config(text, config, options)}") from error
        if error.args[:1] == (text,):  # what options give is named by them later
            given = {name: name for name in options}
            error.args = (in_words_of_config(text, config, given), *error.args[1:])
        raise


def _host(args: argparse.Namespace) -> Host:
    packages: dict[str, str] = {}
    for text in args.assume_package:
        try:
            name, version = package_requirements.name_and_version(text)
        except ValueError as error:
            raise UsageError(f"--assume-package: {error} (NAME== says that it is not installed)") from None
        if name in packages:
            raise UsageError(f"--assume-package: {quoted(name)} is given twice; give one version")
        packages[name] = version
    if args.device is not None:
        return Host.assume(args.device, packages=packages)
    return Host.probe() if not packages else Host.probe().stating(packages)


def _tell_of_strange_packages(assumed: Sequence[str]) -> None:
    """A line on standard error for each package of --assume-package that no spec requires, such as a misspelt one.

    It is no error: a plugin's own check may read a version that its spec does not require.
    """
    specs = [record.spec for record in registry().records if record.spec is not None]
    required = {package_requirements.parse(text).name for spec in specs for text in spec.all_requires}
    for text in assumed:
        name = package_requirements.name_and_version(text)[0]
        if name not in required:
            line = f"--assume-package: no plugin installed here requires {quoted(name)}{did_you_mean(name, required)}"
            if name.startswith("attn-"):
                line += "; a plugin is installed here, for which no GPU is needed, and what it requires is assumed"
            _warn(line)


def _tell_what_an_assumed_machine_has(negotiation: Negotiation | JointNegotiation, device: str) -> None:
    """A note on standard error: what was not asked, for want of a package that was not stated or of a plugin."""
    candidates = [one for _, part in _by_phase(negotiation) for one in (*part.usable, *part.rejected)]
    missing = set()
    for reason in (reason for one in candidates for reason in one.reasons if reason.code == "requirement"):
        with contextlib.suppress(ValueError, TypeError):  # a plugin's own reason may ask for anything
            missing.add(package_requirements.parse(reason.asked).name)
    lines = []
    if missing:
        named = " ".join(f"--assume-package {name}==VERSION" for name in sorted(missing)[:2])
        lines.append(f"{device} is assumed to have the packages that are named alone: say what is there by {named}")
    if any(one.state == "not_installed" for one in candidates):
        lines.append("a plugin that is not installed here is not asked; it installs without a GPU")
    for line in lines:
        print_lines(f"attncore explain: note: {line}", sys.stderr)


def _tell_of_strange_backends(preferred: Sequence[str], excluded: Sequence[str]) -> None:
    """A line on standard error for each backend of --prefer that is not installed, such as a misspelt one, and for each
    of --exclude whose name resembles one that may be used then.

    It is no error: one command line may serve machines on which others are installed.
    """
    installed = {record.name for record in registry().records}
    for name in dict.fromkeys(preferred):
        if name not in installed:
            _warn(not_installed("--prefer", name))
    for name in dict.fromkeys(excluded):
        if close_name(name, {*installed, *KNOWN}):
            _warn(not_installed("--exclude", name))


def _tell_of_contradictions(backend: str | None, preferred: Sequence[str], excluded: Sequence[str]) -> None:
    """A line on standard error for each backend that is asked for and excluded. It is excluded, and no error: a script
    may add an option to those that it was given.
    """
    for option, names in (("--backend", [backend]), ("--prefer", preferred)):
        for name in dict.fromkeys(names):
            if name is not None and name in excluded:
                _warn(f"{option}: {quoted(name)} is in --exclude, too, which wins; take it out of one of them")


def _warn(text: object) -> None:
    print_lines(f"attncore explain: warning: {text}", sys.stderr)


def _by_phase(negotiation: Negotiation | JointNegotiation) -> Sequence[tuple[str, Negotiation]]:
    """The negotiation of each phase, by its name; of both together under an empty one."""
    if isinstance(negotiation, JointNegotiation):
        return (("prefill", negotiation.prefill), ("decode", negotiation.decode))
    return (("", negotiation),)


def _print(negotiation: Negotiation | JointNegotiation, choice: Choice | JointChoice | None, *, verbose: bool) -> None:
    asked = ", ".join(f"{name} {_word(value)}" for name, value in negotiation.request.as_json().items())
    host = negotiation.host
    print_lines(f"request: {asked}")
    print_lines(f"host: {host.device} ({'assumed' if host.assumed else host.device_name or 'found'})")
    for note in host.notes:
        print_lines(f"note: {note}")
    for phase, of_phase in _by_phase(negotiation):
        print(f"\n{phase}:" if phase else "")
        print_lines(explain(of_phase))
    print()
    if choice is None:
        print_lines(negotiation.refusal)
    else:
        cache = f"kv_cache_layout {choice.kv_cache_layout}, kv_cache_dtype {choice.kv_cache_dtype}"
        print_lines(f"block_size {choice.block_size}, {cache}")
        for line in _captured(choice):
            print_lines(line)
        if verbose:
            print()
            print_lines("metadata that it reads in a step; builders make them, an engine need not care:")
            for line in _needs(choice):
                print_lines(line)


def _by_choice(choice: Choice | JointChoice) -> dict[str, Choice]:
    """The chosen one, or the two of a joint choice, by what a line about them begins with."""
    return {"prefill ": choice.prefill, "decode ": choice.decode} if isinstance(choice, JointChoice) else {"": choice}


def _captured(choice: Choice | JointChoice) -> Iterator[str]:
    """What may be captured in CUDA graphs, whatever the request captures."""
    for phase, one in _by_choice(choice).items():
        level = one.spec.cuda_graph
        yield f"{phase}cuda_graph {level}: {GRAPH_LEVELS[level]} (of {', '.join(GRAPH_LEVELS)})"


def _needs(choice: Choice | JointChoice) -> Iterator[str]:
    """What the chosen backend reads of a step, by the names that its spec has for that and what these mean."""
    for phase, one in _by_choice(choice).items():
        facts = plain_facts(one.spec)
        for name, where in (("host_needs", "on the host"), ("device_needs", "on the device")):
            yield f"{phase}{where} ({name}): {facts[name]}"


def _word(value: object) -> str:
    return ",".join(map(str, value)) if isinstance(value, list) else str(value)


def _as_json(negotiation: Negotiation | JointNegotiation, choice: Choice | JointChoice | None) -> dict[str, Any]:
    backends: Any = {
        phase: [_row(one, of_phase) for one in (*of_phase.usable, *of_phase.rejected)]
        for phase, of_phase in _by_phase(negotiation)
    }
    return {
        "request": negotiation.request.as_json(),
        "host": negotiation.host.as_json(),
        "chosen": choice.as_json() if choice is not None else None,
        "backends": backends.get("", backends),
    }


def _row(candidate: Candidate, negotiation: Negotiation) -> dict[str, Any]:
    return {**candidate.as_json(), "chosen": candidate is negotiation.chosen}
