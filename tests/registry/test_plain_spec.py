"""A plugin's spec is read once, into values of our own: one mistaken plugin is its own row, and stops nothing else."""

import json

import pytest

import attncore
from attncore import AttentionRequest, BackendSpec, Host, MultipleOf, Option, Reason, Variant
from attncore.cli import main
from attncore.quoted import MAX_ITEMS, describe_error, json_value, one_line, quoted
from attncore.registry.choice.negotiate import negotiate
from attncore.registry.plugins import load
from attncore.registry.plugins.plugin_record import PluginRecord
from attncore.registry.reasons import FailedCheck
from attncore.registry.spec.backend_spec import plain_spec
from attncore.registry.spec.plain_values import MAX_ENTRIES, MAX_SIZES

HEADER = "from attncore import BackendSpec, MultipleOf, Option, Reason, Variant, hookimpl\n"
GOOD = """BackendSpec(name="bad", api=1, factory="m:B", devices={"any": 99}, dtypes={"float32"}, head_sizes={64},
    block_sizes=MultipleOf(16))"""
HOOK = "\n@hookimpl\ndef attncore_backend():\n"
SUBCLASS = f"""{HEADER}
class Spec(BackendSpec):
    %s
{HOOK}    return {GOOD.replace("BackendSpec(", "Spec(")}
"""
CHANGED = f"{HEADER}{HOOK}    spec = {GOOD}\n    object.__setattr__(spec, %r, %s)\n    return spec\n"
WITH = f"{HEADER}%s{HOOK}    return {GOOD[:-1]}, %s)\n"
RAISING = """
class Text(str):
    def _raises(self, *_): raise RuntimeError("asked again")
    __eq__ = __hash__ = __repr__ = __str__ = __format__ = __len__ = __iter__ = _raises
class Number(int):
    __eq__ = __hash__ = __repr__ = __str__ = __lt__ = __le__ = __gt__ = __ge__ = __int__ = __bool__ = Text._raises
class Table(dict):
    def __init__(self, *given): super().__init__(*given); self.asked = 0
    def __getitem__(self, key):
        self.asked += 1
        if self.asked > len(self): raise RuntimeError("asked again")
        return super().__getitem__(key)
"""
MISTAKES = {  # name -> (light module, what its reason must hold)
    "no checks": (SUBCLASS % "def __post_init__(self): object.__setattr__(self, 'devices', 3)", "devices: 3"),
    "raising property": (
        SUBCLASS % "check = property(lambda self: 1 / 0, lambda self, value: None)",
        "ZeroDivisionError",
    ),
    "no getattr": (SUBCLASS % "def __getattribute__(self, name): raise SystemExit(4)", "SystemExit"),
    "fields of None": (CHANGED % ("devices", "None"), "devices: None is not a mapping"),
    "variants of None": (CHANGED % ("_by_variant", "None") + "\n#", None),
    "endless": (CHANGED % ("notes", "iter(lambda: 'again', '')"), f"notes: more than {MAX_ENTRIES} items"),
    "endless sizes": (CHANGED % ("head_sizes", "iter(lambda: 1, 0)"), f"head_sizes: more than {MAX_SIZES} items"),
    "long note": (WITH % ("", "notes=['x' * 10**7]"), "notes: a text of 10000000 letters; at most 1000"),
    "long reason": (WITH % ("", "unsupported={'alibi': 'x' * 10**7}"), "unsupported: a text of 10000000 letters"),
    "long name": (CHANGED % ("name", "'x' * 10**7"), "name: a text of 10000000 letters"),
    "long factory": (CHANGED % ("factory", "'x' * 10**7"), "factory: a text of 10000000 letters"),
    "long word": (WITH % ("", "features=['x' * 10**7]"), "features: a text of 10000000 letters"),
    "long requirement": (WITH % ("", "requires=['x' * 10**7]"), "requires: a text of 10000000 letters"),
    "long field": (WITH % ("", "**{'x' * 10**7: 1}"), "a spec has no such field"),
    "long fact": (WITH % ("", "variants=[Variant('a', **{'x' * 10**7: 1})]"), "no variant may state"),
    "long help": (WITH % ("", "options={'a': Option(int, 'x' * 10**7)}"), "help: a text of 10000000 letters"),
    "long choice": (WITH % ("", "options={'a': Option(str, '', None, ['x' * 10**7])}"), "choices: a text of 10000000"),
    "huge default": (WITH % ("", "options={'a': Option(int, '', 10**5000)}"), "default: an integer of 16610 bits"),
    "many choices": (WITH % ("", "options={'a': Option(int, '', 1, range(10**9))}"), "choices: more than 64 items"),
    "many options": (WITH % ("", "options={f'a{i}': Option(int, '') for i in range(999)}"), "options: more than 64"),
    "long option": (WITH % ("", "options={'a' * 10**7: Option(int, '')}"), "options: a text of 10000000 letters"),
    "many variants": (WITH % ("", "variants=[Variant(f'a{i}') for i in range(1000)]"), "variants: more than 64 items"),
    "long variant": (WITH % ("", "variants=[Variant('x' * 10**7)]"), "variants: a text of 10000000 letters"),
    "huge size": (CHANGED % ("head_sizes", "[10 ** 5000]"), "head_sizes: an integer of 16610 bits"),
    "huge api": (CHANGED % ("api", "10 ** 5000"), "built for contract int"),
    "faked class": (
        f"{HEADER}class Liar:\n    __class__ = property(lambda self: BackendSpec)\n{HOOK}    return Liar()",
        "AttributeError: 'Liar' object has no attribute 'name'",
    ),
    "mute": (
        f"{HEADER}class E(Exception):\n    def __str__(self): raise MemoryError\n{HOOK}    raise E",
        "E: without a",
    ),
    "endless recursion": (f"{HEADER}{HOOK}    return attncore_backend()", "RecursionError"),
    "no memory": (f"{HEADER}{HOOK}    raise MemoryError", "MemoryError: without a message"),
    "long": (f"{HEADER}{HOOK}    raise ValueError('x' * 1_000_000)", "... (1000000 letters)"),
    "escapes": (f"{HEADER}{HOOK}    raise ValueError('\\x1b[31m\\x9b31m\\u202e')", "\\x1b[31m\\x9b31m\\u202e"),
    "other contract": (
        f"{HEADER}from attncore.registry.spec.backend_spec import ContractVersionError\n"
        f"class E(ContractVersionError):\n    api = property(lambda self: 1 / 0, lambda self, value: None)\n"
        f"{HOOK}    raise E(2)",
        "E: api: built for contract 2",
    ),
}


def bad_row(site, source):
    site.plugin("bad", source)
    site.plugin("good")
    rows = {record.name: record for record in load.registry().records}
    assert rows["good"].state == rows["reference"].state == "loaded"
    return rows["bad"]


@pytest.mark.parametrize("mistake", [name for name, (_, text) in MISTAKES.items() if text])
def test_a_mistaken_spec_is_its_own_row(site, capsys, mistake):
    source, text = MISTAKES[mistake]
    record = bad_row(site, source)
    assert record.state in ("broken", "incompatible")
    assert text in record.reasons[0].message
    assert len(record.reasons[0].message) < 5000
    assert record.reasons[0].message.isprintable()
    asked = {"num_heads": 2, "num_kv_heads": 1, "head_size": 64, "dtype": "float32"}
    assert attncore.select(**asked).name == "good"
    for words in (["list"], ["list", "--json"], ["explain"], ["explain", "--json"], ["explain", "--joint"]):
        assert main(words) == 0
        assert "Traceback" not in capsys.readouterr().err


def test_what_is_derived_from_a_spec_is_made_anew(site):
    record = bad_row(site, MISTAKES["variants of None"][0])
    assert record.spec.by_variant == (("", record.spec),)


@pytest.mark.parametrize(
    "extra",
    [
        "kv_cache_layouts=(Text('NHD'),), features=[Text('sinks')], device_needs={'block_table': 1}.keys()",
        "unsupported=Table({'alibi': Text('no')}), notes=[Text('slow')], requires=()",
        "preferred_block_size=Number(16), max_block_id=Number(9), pad_seq_len=Number(1)",
        "options=Table({'x': Option(str, Text('help'), Text('a'), (Text('a'), Text('b')))})",
        "variants=(Variant('one', head_sizes=[Number(64)], notes=(Text('n'),)),)",
    ],
)
def test_objects_of_a_plugin_are_read_into_plain_ones(site, extra):
    """None of them is asked a second time: the methods of the plugin's classes raise."""
    record = bad_row(site, WITH % (RAISING, extra))
    assert record.state == "loaded", record.reasons
    assert foreign(record.spec) == []
    hash(record.spec.options)
    repr(record.spec)
    choice = attncore.select(num_heads=2, num_kv_heads=1, head_size=64, dtype="float32")
    assert choice.name == "bad"
    choice.explain()


def foreign(value, seen=()):
    """Every value inside a spec whose class is none of Python's or of ours."""
    if any(value is one for one in seen):
        return []
    kind, seen = type(value), (*seen, value)
    ours = kind.__module__ == "builtins" or kind in (BackendSpec, MultipleOf, Option, Variant)
    found = [] if ours or kind.__name__ == "FrozenMap" else [value]
    if kind.__name__ == "FrozenMap":
        value = dict(value)
    if kind in (BackendSpec,):
        inside = vars(value).values()
    elif kind is Option:
        inside = (value.type, value.help, value.default, value.choices)
    elif kind is Variant:
        inside = (value.name, value.requires, value.facts)
    else:
        inside = value.items() if isinstance(value, dict) else value if isinstance(value, tuple | frozenset) else ()
    return found + [one for part in inside for one in foreign(part, seen)]


def test_a_spec_that_its_plugin_keeps_and_changes_is_not_ours(site):
    source = f"{HEADER}SPEC = {GOOD}\n{HOOK}    return SPEC\n"
    record = bad_row(site, source)
    import attn_bad

    object.__setattr__(attn_bad.SPEC, "devices", None)
    assert dict(record.spec.devices) == {"any": 99}


def test_plain_spec_keeps_every_field():
    check = lambda request, host: ()  # noqa: E731
    spec = BackendSpec(
        name="one",
        api=1,
        factory="m:B",
        devices={"any": 1},
        dtypes=["float32"],
        head_sizes=MultipleOf(8, 64),
        block_sizes=(16,),
        check=check,
        options={"x": Option(float, "help", 1.5)},
        variants=(Variant("a", requires=("numpy",), use_mla=True),),
    )
    assert plain_spec(spec) == spec
    assert plain_spec(spec) is not spec
    assert plain_spec(spec).by_variant == spec.by_variant
    assert plain_spec(spec).check is check


def _endless(request, host):
    while True:
        yield "no"


class _Odd(Reason):
    """A reason of a plugin's own class, whose values raise when they are printed."""

    message = property(lambda self: "odd", lambda self, value: None)


class _Mute:
    def __repr__(self):
        raise RuntimeError

    __str__ = __repr__


@pytest.mark.parametrize(
    ("check", "text"),
    [
        (_endless, f"yields more than {MAX_ITEMS} reasons"),
        (lambda request, host: [Reason("check", "no", asked=_Mute(), accepted={_Mute(): 10**5000})], "no"),
        (lambda request, host: Reason("check", "no", asked=_Table(a=1)), "KeyError"),
        (lambda request, host: [_Odd("check", "")], "odd"),
        (lambda request, host: iter(int, 1), "yields a int"),
    ],
    ids=["endless", "mute values", "raising mapping", "subclass", "numbers"],
)
def test_what_a_check_answers_is_read_once(check, text):
    spec = BackendSpec(
        name="one", api=1, factory="m:B", devices={"any": 1}, dtypes=["float32"], head_sizes={64}, block_sizes={16},
        check=check,
    )  # fmt: skip
    record = PluginRecord("one", "attn-one", "1", "loaded", spec=spec)
    request = AttentionRequest(num_heads=1, num_kv_heads=1, head_size=64, dtype="float32")
    negotiation = negotiate(request, Host.assume("cpu"), [record])
    reasons = next(one for one in negotiation.rejected if one.name == "one").reasons
    assert text in reasons[-1].message
    assert all(type(reason) in (Reason, FailedCheck) for reason in reasons)  # ours, and no class of a plugin
    assert [reason.as_json() for reason in reasons]


class _Table(dict):
    def __getitem__(self, key):
        raise KeyError(key)


def test_any_value_has_a_text():
    class Meta(type):
        __name__ = property(lambda cls: 1 / 0)

    class Error(Exception, metaclass=Meta):
        def __str__(self):
            raise SystemExit(3)

    class Text(str):
        split = isprintable = __iter__ = __len__ = property(lambda self: 1 / 0)

    class Returns:
        def __str__(self):
            return Text("a\tb")

    assert describe_error(Error()) == "Error: without a message"
    assert quoted(_Mute()) == "<_Mute>"
    assert one_line(Returns()) == "a b"
    assert one_line("x" * 5000).endswith("x ... (5000 letters)")
    assert json_value([10**5000, Text("t"), "", 2**64 - 1, True]) == ["int", "t", "", 2**64 - 1, True]
    assert type(json_value(Text("t"))) is str
    wide = [1] * 100
    for _ in range(5):  # 10**12 numbers in all
        wide = [wide] * 100
    assert len(json.dumps(json_value(wide))) < 10 * MAX_ITEMS


def test_ctrl_c_says_which_plugin_it_met(site):
    site.plugin("waits", "raise KeyboardInterrupt")
    with pytest.raises(KeyboardInterrupt) as caught:
        load.registry()
    assert caught.value.__notes__ == ["while waits (attn-waits 1.0) was loaded"]
