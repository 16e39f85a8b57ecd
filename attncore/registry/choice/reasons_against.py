"""One form of a spec against one request on one host: every reason why not. Pure; no reason hides another."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from attncore.registry import requirements
from attncore.registry.devices import best_match
from attncore.registry.host.host import Host
from attncore.registry.plugins.load import described
from attncore.registry.reasons import OTHER, Reason, listed
from attncore.registry.request import AttentionRequest
from attncore.registry.spec import sizes
from attncore.registry.spec.backend_spec import BackendSpec
from attncore.registry.spec.sizes import Sizes
from attncore.vocabulary import GRAPH_LEVELS, PHASES


def judge(form: BackendSpec, request: AttentionRequest, host: Host, source: str, plugin: str) -> list[Reason]:
    """Why ``form`` cannot serve ``request`` on ``host``; empty where it can.

    ``source`` says who states the facts (the library of a variant, else the plugin), ``plugin`` whose requirements they
    are.
    """
    found = [reason for check in _CHECKS for reason in check(form, request, host, source)]
    if not any(reason.code == "device" for reason in found):  # elsewhere, installing something would not help
        found.extend(_requirements(form, host, plugin))
    found.extend(_options(form, request, source))
    found.extend(_own_check(form, request, host, plugin))
    return found


def usable_blocks(form: BackendSpec, request: AttentionRequest) -> Sizes:
    """The block sizes of the kernel that both accept; an empty frozenset where there is none."""
    accepted: Sizes = form.block_sizes  # type: ignore[assignment]
    if request.block_size is not None:
        return frozenset({request.block_size} if request.block_size in accepted else ())
    if request.manager_block_size is not None:
        return frozenset(sizes.divisors_within(accepted, request.manager_block_size))
    return accepted


def usable_layouts(form: BackendSpec, request: AttentionRequest) -> tuple[str, ...]:
    """The cache layouts that both accept, the backend's preferred one first."""
    return tuple(name for name in form.kv_cache_layouts if request.kv_cache_layout in (None, name))


def pick_block(blocks: Sizes, request: AttentionRequest, preferred: Iterable[int | None]) -> int:
    """One of ``blocks``: the first of ``preferred`` among them, else the largest that divides the manager's, else the
    smallest.
    """
    chosen = next((size for size in preferred if size is not None and size in blocks), None)
    if chosen is None and isinstance(blocks, frozenset) and request.manager_block_size is not None:
        return max(blocks)
    return chosen or sizes.smallest(blocks)


def _refuse(code: str, field: str, asked: object, accepted: object, words: str, source: str, fix: str) -> Reason:
    return Reason(code, f"{field} {asked} not supported by {source}; supported: {words}", asked, accepted, source, fix)


def _device(form: BackendSpec, request: AttentionRequest, host: Host, source: str) -> Iterator[Reason]:
    if best_match(form.devices, host.device) is None:
        names = list(form.devices)
        yield _refuse("device", "device", host.device, names, listed(names), source, OTHER)


def _dtype(form: BackendSpec, request: AttentionRequest, host: Host, source: str) -> Iterator[Reason]:
    if request.dtype not in form.dtypes:
        names = sorted(form.dtypes)
        yield _refuse("dtype", "dtype", request.dtype, names, listed(names), source, f"run the model in {names[0]}")


def _kv_cache_dtype(form: BackendSpec, request: AttentionRequest, host: Host, source: str) -> Iterator[Reason]:
    asked, accepted = request.kv_cache_dtype, form.kv_cache_dtypes
    if asked not in accepted and not (asked == request.dtype and "auto" in accepted):
        names = sorted(accepted)
        fix = "leave kv_cache_dtype at auto" if "auto" in accepted else f"set kv_cache_dtype to {names[0]}"
        yield _refuse("kv_cache_dtype", "kv_cache_dtype", asked, names, listed(names), source, fix)


def _head_sizes(form: BackendSpec, request: AttentionRequest, host: Host, source: str) -> Iterator[Reason]:
    accepted: Sizes = form.head_sizes  # type: ignore[assignment]
    if request.head_size not in accepted:
        words = sizes.describe(accepted)
        yield _refuse("head_size", "head_size", request.head_size, sizes.as_json(accepted), words, source, OTHER)
    asked, values = request.head_size_v, form.head_size_v
    if asked is None or asked == request.head_size:
        return
    if values is None:
        words = "the same as head_size"
        yield _refuse("head_size_v", "head_size_v", asked, request.head_size, words, source, OTHER)
    elif asked not in values:
        words = sizes.describe(values)  # type: ignore[arg-type]
        yield _refuse("head_size_v", "head_size_v", asked, sizes.as_json(values), words, source, OTHER)  # type: ignore[arg-type]


def _blocks(form: BackendSpec, request: AttentionRequest, host: Host, source: str) -> Iterator[Reason]:
    accepted: Sizes = form.block_sizes  # type: ignore[assignment]
    blocks = usable_blocks(form, request)
    if isinstance(blocks, frozenset) and not blocks:
        words = sizes.describe(accepted)
        if request.block_size is not None:
            asked, field = request.block_size, "block_size"
        else:
            asked, field = request.manager_block_size or 0, "manager_block_size"
            words = f"what these divide: {words}"
        fix = f"set {field} to {form.preferred_block_size or sizes.smallest(accepted)}, or leave it out"
        yield _refuse("block_size", field, asked, sizes.as_json(accepted), words, source, fix)


def _layout(form: BackendSpec, request: AttentionRequest, host: Host, source: str) -> Iterator[Reason]:
    if not usable_layouts(form, request):
        names = list(form.kv_cache_layouts)
        fix = "leave kv_cache_layout out"
        yield _refuse("kv_cache_layout", "kv_cache_layout", request.kv_cache_layout, names, listed(names), source, fix)


def _limits(form: BackendSpec, request: AttentionRequest, host: Host, source: str) -> Iterator[Reason]:
    group = request.num_heads // request.num_kv_heads
    largest_id = None if form.max_block_id is None else form.max_block_id + 1
    shorter, fewer = "serve shorter sequences", "make the cache smaller, or its blocks larger"
    for code, field, asked, limit, fix in (
        ("group_size", "query heads per key/value head:", group, form.max_group_size, OTHER),
        ("max_model_len", "max_model_len", request.max_model_len, form.max_model_len, shorter),
        # ids 1 .. num_blocks - 1, and the sink block after them
        ("num_blocks", "num_blocks", request.num_blocks, None if largest_id is None else largest_id - 1, fewer),
    ):
        if asked is not None and limit is not None and asked > limit:
            yield _refuse(code, field, asked, limit, f"at most {limit}", source, fix)


def _features(form: BackendSpec, request: AttentionRequest, host: Host, source: str) -> Iterator[Reason]:
    for feature in request.asked_features:
        if feature in form.features or (feature == "alibi_standard" and "alibi" in form.features):
            continue
        has = sorted(form.features)
        if feature in form.unsupported:
            message = f"{feature} not supported by {source}: {form.unsupported[feature]}"
            yield Reason("unsupported", message, feature, has, source, OTHER)
        elif feature == "alibi" and "alibi_standard" in form.features:
            message = f"alibi not supported by {source}; supported: the standard slopes only"
            yield Reason(
                "unsupported", message, feature, has, source, "ask alibi='standard' if the slopes are standard"
            )
        else:
            message = f"{feature} not declared by {source}; declared: {listed(has)}"
            yield Reason("undeclared", message, feature, has, source, OTHER)
    if request.use_mla and not form.use_mla:
        yield Reason(
            "mla", f"latent attention not supported by {source}; supported: plain heads", True, False, source, OTHER
        )
    if form.mla_only and not request.use_mla:
        yield Reason(
            "mla", f"plain heads not supported by {source}; supported: latent attention", False, True, source, OTHER
        )


def _graph(form: BackendSpec, request: AttentionRequest, host: Host, source: str) -> Iterator[Reason]:
    if GRAPH_LEVELS.index(request.cuda_graph) > GRAPH_LEVELS.index(form.cuda_graph):
        names = list(GRAPH_LEVELS[: GRAPH_LEVELS.index(form.cuda_graph) + 1])
        fix = f"capture {form.cuda_graph} at most" if form.cuda_graph != "never" else "run without graphs"
        yield _refuse("cuda_graph", "cuda_graph", request.cuda_graph, names, listed(names), source, fix)


def _phase(form: BackendSpec, request: AttentionRequest, host: Host, source: str) -> Iterator[Reason]:
    asked = PHASES if request.phase is None else (request.phase,)
    if not form.phases.issuperset(asked):  # type: ignore[attr-defined]
        names = sorted(form.phases)
        fix = "select a backend for each phase (select_joint)"
        yield _refuse("phase", "phase", " and ".join(asked), names, listed(names), source, fix)


def _compiler(form: BackendSpec, request: AttentionRequest, host: Host, source: str) -> Iterator[Reason]:
    if form.compiles_at_run_time and not request.allow_compile:
        message = f"allow_compile False not supported by {source}, which compiles kernels at first use"
        yield Reason("compiler", message, False, [True], source, "allow compilation, or warm a cache and allow it")


def _requirements(form: BackendSpec, host: Host, plugin: str) -> Iterator[Reason]:
    for text in form.requires:
        wanted = requirements.parse(text)
        version = host.packages.get(wanted.name)
        if not version:
            message = f"{wanted.name} is not installed; {plugin} needs {text}"
        elif not requirements.satisfied(wanted, version):
            message = f"{wanted.name} {version} is installed; {plugin} needs {text}"
        else:
            continue
        target = f"'{text}'" if wanted.clauses else wanted.name
        yield Reason("requirement", message, text, version or None, plugin, f"pip install {target}")


def _options(form: BackendSpec, request: AttentionRequest, source: str) -> Iterator[Reason]:
    for name, value in request.options.get(form.name, {}).items():
        if problem := option_problem(form, name, value):
            yield Reason(
                "option",
                f"option {problem}",
                {name: value},
                sorted(form.options),
                source,
                f"correct options[{form.name!r}]",
            )


def option_problem(form: BackendSpec, name: str, value: object) -> str | None:
    """What is wrong with one option, as a sentence that begins with its name; None where nothing is."""
    option = form.options.get(name)
    if option is None:
        return f"{name!r} is not declared by {form.name}; declared: {listed(sorted(form.options))}"
    wrong = option.problem(value)
    return f"{name!r}: {value!r} {wrong}" if wrong else None


def _own_check(form: BackendSpec, request: AttentionRequest, host: Host, plugin: str) -> list[Reason]:
    """What the plugin's own function says: several answers, a single one, or None for none."""
    found: list[Reason] = []
    if form.check is None:
        return found
    try:
        answers: object = form.check(request, host)
        if answers is None or isinstance(answers, str | Reason):
            answers = () if answers is None else (answers,)
        for answer in answers:  # type: ignore[attr-defined]
            if isinstance(answer, Reason):
                found.append(answer)
            elif isinstance(answer, str):
                found.append(Reason("check", answer, source=plugin, fix=OTHER))
            else:
                raise TypeError(f"it yields a {type(answer).__name__}, neither a sentence nor a Reason")
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # the plugin's code: its failure is a reason against it, not against the others
        message = f"the check of {plugin} failed: {described(error)}"
        found.append(Reason("check", message, source=plugin, fix=f"update {plugin}, or report it to its authors"))
    return found


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
