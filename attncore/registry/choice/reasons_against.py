"""Every reason against one spec for a request on a host. A pure function; no reason hides another."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from contextvars import ContextVar
from dataclasses import replace
from shlex import quote
from typing import Any

from attncore.did_you_mean import did_you_mean
from attncore.quoted import MAX_ITEMS, add_note, describe_error, json_value, listed, plain_text, quoted, type_name
from attncore.registry import package_requirements
from attncore.registry.choice.cache_format import common_block_sizes, common_layouts
from attncore.registry.device_patterns import best_match, without_contained
from attncore.registry.host.host import Host
from attncore.registry.plugins.plugin_code import run_plugin_code
from attncore.registry.reasons import USE_ANOTHER, FailedCheck, Reason
from attncore.registry.request import AttentionRequest
from attncore.registry.spec import sizes
from attncore.registry.spec.backend_spec import BackendSpec
from attncore.registry.spec.facts import has_feature
from attncore.registry.spec.sizes import Sizes
from attncore.registry.spec.variant import Check
from attncore.vocabulary import GRAPH_LEVELS, PHASES

_checked: ContextVar[str] = ContextVar("_checked", default="")
"""The plugin whose check runs: one that negotiates would ask itself again and again."""


def reasons_against(spec: BackendSpec, request: AttentionRequest, host: Host, source: str, plugin: str) -> list[Reason]:
    """Why ``spec`` cannot serve ``request`` on ``host``; empty where it can.

    ``spec`` is as one of its variants states it. ``source`` names who states the facts (the library of a variant, else
    the plugin), ``plugin`` the distribution whose requirements they are.
    """
    reasons = [reason for check in _CHECKS for reason in check(spec, request, host, source)]
    if not any(reason.code == "device" for reason in reasons):  # on another device installing something would not help
        reasons.extend(_requirements(spec, host, plugin))
    reasons.extend(_options(spec, request, source))
    reasons.extend(_own_check(spec, request, host, plugin))
    return reasons


def _not_supported(
    code: str, field: str, asked: object, accepted: object, words: str, source: str, fix: str = USE_ANOTHER
) -> Reason:
    return Reason(code, f"{field} {asked} not supported by {source}; supported: {words}", asked, accepted, source, fix)


def _device(spec: BackendSpec, request: AttentionRequest, host: Host, source: str) -> Iterator[Reason]:
    if best_match(spec.devices, host.device) is None:
        names = without_contained(spec.devices)
        yield _not_supported("device", "device", host.device, names, listed(names), source)


def _dtype(spec: BackendSpec, request: AttentionRequest, host: Host, source: str) -> Iterator[Reason]:
    if request.dtype not in spec.dtypes:
        names = sorted(spec.dtypes)
        yield _not_supported(
            "dtype", "dtype", request.dtype, names, listed(names), source, f"run the model in {names[0]}"
        )


def _kv_cache_dtype(spec: BackendSpec, request: AttentionRequest, host: Host, source: str) -> Iterator[Reason]:
    asked, accepted = request.kv_cache_dtype, spec.kv_cache_dtypes
    if asked not in accepted and not (asked == request.dtype and "auto" in accepted):
        names = sorted(accepted)
        fix = "leave kv_cache_dtype at auto" if "auto" in accepted else f"set kv_cache_dtype to {names[0]}"
        # Why a backend has no scales, which an fp8 cache alone has, is why it has no fp8.
        why = spec.unsupported.get("kv_scales") if asked.startswith("fp8") else None
        words = listed(names) if why is None else f"{listed(names)} ({why})"
        yield _not_supported("kv_cache_dtype", "kv_cache_dtype", asked, names, words, source, fix)


def _head_sizes(spec: BackendSpec, request: AttentionRequest, host: Host, source: str) -> Iterator[Reason]:
    accepted: Sizes = spec.head_sizes  # type: ignore[assignment]
    if request.head_size not in accepted:
        words = sizes.describe(accepted)
        yield _not_supported("head_size", "head_size", request.head_size, sizes.as_json(accepted), words, source)
    asked, values = request.head_size_v or request.head_size, spec.head_size_v
    if asked == request.head_size and not (request.use_mla and values is not None):
        return
    if values is None:
        words = "the same as head_size"
        yield _not_supported("head_size_v", "head_size_v", asked, request.head_size, words, source)
    elif asked not in values:
        words = sizes.describe(values)  # type: ignore[arg-type]
        yield _not_supported("head_size_v", "head_size_v", asked, sizes.as_json(values), words, source)  # type: ignore[arg-type]


def _blocks(spec: BackendSpec, request: AttentionRequest, host: Host, source: str) -> Iterator[Reason]:
    accepted: Sizes = spec.block_sizes  # type: ignore[assignment]
    block_sizes = common_block_sizes(spec, request)
    if isinstance(block_sizes, frozenset) and not block_sizes:
        words = sizes.describe(accepted)
        if request.block_size is not None:
            asked, field = request.block_size, "block_size"
        else:
            asked, field = request.manager_block_size or 0, "manager_block_size"
            words = f"what these divide: {words}"
        fix = f"set {field} to {spec.preferred_block_size or sizes.smallest(accepted)}, or leave it out"
        yield _not_supported("block_size", field, asked, sizes.as_json(accepted), words, source, fix)


def _layout(spec: BackendSpec, request: AttentionRequest, host: Host, source: str) -> Iterator[Reason]:
    if not common_layouts(spec, request):
        names = list(spec.kv_cache_layouts)
        fix = "leave kv_cache_layout out"
        yield _not_supported(
            "kv_cache_layout", "kv_cache_layout", request.kv_cache_layout, names, listed(names), source, fix
        )


def _limits(spec: BackendSpec, request: AttentionRequest, host: Host, source: str) -> Iterator[Reason]:
    group = request.num_heads // request.num_kv_heads
    most_blocks = None if spec.max_block_id is None else spec.max_block_id + 1  # ids begin at 0
    shorter, fewer = "serve shorter sequences", "make the cache smaller, or its blocks larger"
    for code, field, asked, limit, fix in (
        ("group_size", "query heads per key/value head:", group, spec.max_group_size, USE_ANOTHER),
        ("max_model_len", "max_model_len", request.max_model_len, spec.max_model_len, shorter),
        ("num_blocks", "num_blocks", request.num_blocks, most_blocks, fewer),
    ):
        if asked is not None and limit is not None and asked > limit:
            yield _not_supported(code, field, asked, limit, f"at most {limit}", source, fix)


def _features(spec: BackendSpec, request: AttentionRequest, host: Host, source: str) -> Iterator[Reason]:
    for feature in request.asked_features:
        if has_feature(spec, feature):
            continue
        has = sorted(spec.features)
        if feature in spec.unsupported:
            message = f"{feature} not supported by {source}: {spec.unsupported[feature]}"
            yield Reason("unsupported", message, feature, has, source, USE_ANOTHER)
        elif feature == "alibi" and "alibi_standard" in spec.features:
            message = f"alibi not supported by {source}; supported: the standard slopes only"
            yield Reason(
                "unsupported", message, feature, has, source, "ask alibi='standard' if the slopes are standard"
            )
        else:
            message = f"{feature} not declared by {source}; declared: {listed(has)}"
            yield Reason("undeclared", message, feature, has, source, USE_ANOTHER)
    if request.use_mla and not spec.use_mla:
        yield Reason(
            "mla",
            f"latent attention not supported by {source}; supported: plain heads",
            True,
            False,
            source,
            USE_ANOTHER,
        )
    if spec.mla_only and not request.use_mla:
        yield Reason(
            "mla",
            f"plain heads not supported by {source}; supported: latent attention",
            False,
            True,
            source,
            USE_ANOTHER,
        )


def _graph(spec: BackendSpec, request: AttentionRequest, host: Host, source: str) -> Iterator[Reason]:
    levels = [*GRAPH_LEVELS]
    names = levels[: levels.index(spec.cuda_graph) + 1]
    if request.cuda_graph not in names:
        fix = f"capture {spec.cuda_graph} at most" if spec.cuda_graph != "never" else "run without graphs"
        yield _not_supported("cuda_graph", "cuda_graph", request.cuda_graph, names, listed(names), source, fix)


def _phase(spec: BackendSpec, request: AttentionRequest, host: Host, source: str) -> Iterator[Reason]:
    asked = PHASES if request.phase is None else (request.phase,)
    if not spec.phases.issuperset(asked):  # type: ignore[attr-defined]
        names = sorted(spec.phases)
        fix = "select a backend for each phase (select_joint)"
        yield _not_supported("phase", "phase", " and ".join(asked), names, listed(names), source, fix)


def _compiler(spec: BackendSpec, request: AttentionRequest, host: Host, source: str) -> Iterator[Reason]:
    if spec.compiles_at_run_time and not request.allow_compile:
        message = f"allow_compile False not supported by {source}, which compiles kernels at first use"
        yield Reason("compiler", message, False, [True], source, "allow compilation, or warm a cache and allow it")


def _requirements(spec: BackendSpec, host: Host, plugin: str) -> Iterator[Reason]:
    for text in package_requirements.needed(spec.requires):
        name = package_requirements.parse(text).name
        version = host.packages.get(name)
        if not version:
            message = f"{name} is not installed; {plugin} needs {text}"
        elif not package_requirements.satisfied(text, version):
            message = f"{name} {version} is installed; {plugin} needs {text}"
        else:
            continue
        fix = spec.install.get(name) or f"pip install {quote(text)}"
        yield Reason("requirement", message, text, version or None, plugin, fix)


def _options(spec: BackendSpec, request: AttentionRequest, source: str) -> Iterator[Reason]:
    for name, value in request.options.get(spec.name, {}).items():
        if problem := option_problem(spec, name, value):
            yield Reason(
                "option",
                f"option {problem}",
                {name: value},
                sorted(spec.options),
                source,
                f"correct options[{spec.name!r}]",
            )


def option_problem(spec: BackendSpec, name: str, value: object) -> str | None:
    """What is wrong with one option, as a sentence that begins with its name; None where it is accepted."""
    option = spec.options.get(name)
    if option is None:
        had = listed(sorted(spec.options))
        return f"{quoted(name)} is not declared by {spec.name}; declared: {had}{did_you_mean(name, spec.options)}"
    wrong = option.problem(value)
    return f"{quoted(name)}: {quoted(value)} {wrong}" if wrong else None


def _own_check(spec: BackendSpec, request: AttentionRequest, host: Host, plugin: str) -> list[Reason]:
    """The answers of the spec's own check: an iterable of them, a single one, or None."""
    if spec.check is None:
        return []
    if within := _checked.get():
        message = f"the check of {plugin} is not asked while the check of {within} runs"
        return [
            FailedCheck(
                "check", message, source=within, fix=f"report to the authors of {within} that a check negotiates"
            )
        ]
    token = _checked.set(plugin)
    try:
        # copies: a check that changes them with object.__setattr__ changes nothing for the others
        return run_plugin_code(plugin, _answers, spec.check, _with_good_options(spec, request), replace(host), plugin)
    except KeyboardInterrupt as error:
        add_note(error, f"while the check of {plugin} ran")
        raise
    except BaseException as error:  # of a timer or a handler of the plugin's, while they are taken back
        return [_failed(error, plugin)]
    finally:
        _checked.reset(token)


def _with_good_options(spec: BackendSpec, request: AttentionRequest) -> AttentionRequest:
    """A copy of ``request``, whose options for this backend are those that the spec accepts: the others have a reason
    of their own, and a check that reads them would fail.
    """
    given = request.options.get(spec.name, {})
    good = {name: value for name, value in given.items() if option_problem(spec, name, value) is None}
    return replace(request, options={**request.options, spec.name: good} if given else request.options)


def _answers(check: Check, request: AttentionRequest, host: Host, plugin: str) -> list[Reason]:
    """What ``check`` answers, read and told within this call: an object of the plugin runs its code there."""
    reasons: list[Reason] = []
    answers: Any = None
    try:
        answers = check(request, host)
        if answers is None or isinstance(answers, str | Reason):
            answers = () if answers is None else (answers,)
        try:
            for answer in answers:
                if len(reasons) == MAX_ITEMS:
                    raise ValueError(f"it yields more than {MAX_ITEMS} reasons")
                reasons.append(_plain_reason(answer, plugin))
        finally:
            if isinstance(answers, Generator):  # what it does when it is closed is done here
                answers.close()
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # the plugin's code: its failure is a reason against it, not against the others
        reasons.append(_failed(error, plugin))
    return reasons


def _failed(error: BaseException, plugin: str) -> Reason:
    message = f"the check of {plugin} failed: {describe_error(error)}"
    return FailedCheck("check", message, source=plugin, fix=f"update {plugin}, or report it to its authors")


def _plain_reason(answer: object, plugin: str) -> Reason:
    """An answer of a plugin's check as a Reason that holds none of its objects."""
    if isinstance(answer, Reason):
        code = plain_text(answer.code) or ""
        asked, accepted = json_value(answer.asked), json_value(answer.accepted)
        return Reason(code, answer.message, asked, accepted, answer.source, answer.fix)
    if isinstance(answer, str):
        return Reason("check", answer, source=plugin, fix=USE_ANOTHER)
    raise TypeError(f"it yields a {type_name(answer)}, neither a sentence nor a Reason")


_Check = Callable[[BackendSpec, AttentionRequest, Host, str], Iterator[Reason]]
_CHECKS: tuple[_Check, ...] = (
    _device,
    _dtype,
    _kv_cache_dtype,
    _head_sizes,
    _blocks,
    _layout,
    _limits,
    _features,
    _graph,
    _phase,
    _compiler,
)
