"""The README says what is there: kernels of the compiler's table, options, variables, the snippet."""

import contextlib
import io
import re
from pathlib import Path

from attn_rocm import crosscompile, settings, spec, tiles

README = (Path(__file__).parents[1] / "README.md").read_text()


def test_the_compilers_table_is_of_these_kernels():
    rows = re.findall(r"^\| ([^|]+) \| [^\n]*KiB", README, re.MULTILINE)
    assert tuple(rows) == crosscompile.names() * 2
    for columns in (crosscompile.FIRST, crosscompile.MORE):
        assert f"| kernel | {' | '.join(columns)} |\n" in README


def test_every_kernel_and_variable_is_told():
    for name in settings.KERNELS[1:]:
        assert f"| `{name}` |" in README
    assert {name for name, _ in spec.make_spec().by_variant} == {*settings.KERNELS[1:], *settings.FORMS}
    for name in (settings.KERNEL, settings.DEV_DEVICE, spec.TRITON_BUILD, *tiles.AMD, *tiles.NVIDIA, *settings.FORMS):
        assert name in README


def test_the_snippet():
    (code,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    told = re.findall(r"# (rocm .*)", code)
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        exec(code, {})
    assert out.getvalue().splitlines() == told
