"""Code nested so deeply that torch would overflow its stack is rejected before torch parses it."""

from __future__ import annotations

import subprocess
import sys
import warnings
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from bf16kit.errors import RuntimeFailure
from bf16kit.runtime import scriptcode, scriptrecords

RECORD = "archive/code/__torch__.py"
HEAD = "def f(x: Tensor) -> Tensor:\n"
RETURN = "  return x\n"

# Each form takes a depth and returns code whose syntax tree is that deep.
FORMS: dict[str, Callable[[int], str]] = {
    "brackets": lambda n: f"{HEAD}  return {'(' * n}x{')' * n}\n",
    "lists": lambda n: f"{HEAD}  y = {'[' * n}x{']' * n}\n{RETURN}",
    "calls": lambda n: f"{HEAD}  return {'torch.relu(' * n}x{')' * n}\n",
    "calls of calls": lambda n: f"{HEAD}  return x{'.relu()' * n}\n",
    "subscripts": lambda n: f"{HEAD}  return x{'[0]' * n}\n",
    "attributes": lambda n: f"{HEAD}  return x{'.T' * n}\n",
    "signs": lambda n: f"{HEAD}  return {'-' * n}x\n",
    "sums": lambda n: f"{HEAD}  return x{' + x' * n}\n",
    "sums over lines": lambda n: f"{HEAD}  return x{' + x' * (n // 2)} \\\n{' + x' * (n // 2)}\n",
    "powers": lambda n: f"{HEAD}  return x{' ** x' * n}\n",
    "comparisons": lambda n: f"{HEAD}  return x{' < x' * n}\n",
    "not": lambda n: f"{HEAD}  y = {'not ' * n}True\n{RETURN}",
    "and": lambda n: f"{HEAD}  y = True{' and True' * n}\n{RETURN}",
    "conditions": lambda n: f"{HEAD}  return {'x if True else ' * n}x\n",
    "types": lambda n: f"def f(x: {'List[' * n}Tensor{']' * n}) -> Tensor:\n  return torch.ones([1])\n",
    "elif": lambda n: HEAD + "  if True:\n    pass\n" + "  elif True:\n    pass\n" * n + RETURN,
    "blocks": lambda n: (
        HEAD + "".join(" " * k + "if True:\n" for k in range(2, n + 2)) + " " * (n + 2) + "pass\n" + RETURN
    ),
}
CHAINS: dict[str, Callable[[int], str]] = {
    "functions": lambda n: (
        "".join(f"def f{k}(x: Tensor) -> Tensor:\n  return __torch__.f{k + 1}(x)\n" for k in range(n))
        + f"def f{n}(x: Tensor) -> Tensor:\n{RETURN}"
    ),
    "classes": lambda n: (
        "".join(f"class C{k}(NamedTuple):\n  a : __torch__.C{k + 1}\n" for k in range(n))
        + f"class C{n}(NamedTuple):\n  a : Tensor\n"
    ),
}


@pytest.mark.parametrize("form", FORMS)
def test_a_deep_form_is_rejected_and_a_shallow_one_is_not(form: str) -> None:
    scriptcode.check({RECORD: FORMS[form](90)})
    with pytest.raises(RuntimeFailure, match=r"the code in 'archive/code/__torch__.py' has .* nested deeper than 1000"):
        scriptcode.check({RECORD: FORMS[form](1100)})


@pytest.mark.parametrize("chain", CHAINS)
def test_a_chain_of_definitions_is_rejected_beyond_its_limit(chain: str) -> None:
    scriptcode.check({RECORD: CHAINS[chain](scriptcode.DEEPEST_CALLS - 1)})
    with pytest.raises(RuntimeFailure, match="in a circle or a chain of more than 300"):
        scriptcode.check({RECORD: CHAINS[chain](scriptcode.DEEPEST_CALLS)})


def test_a_chain_through_records_and_a_circle_are_rejected() -> None:
    """The case of a record's name does not matter, because torch ignores it."""
    there = {
        f"m/CODE/__torch__/M{k}.py": f"class C(Module):\n  a : __torch__.m{k + 1}.C\n"
        for k in range(scriptcode.DEEPEST_CALLS + 1)
    }
    with pytest.raises(RuntimeFailure, match="in a circle or a chain"):
        scriptcode.check(there)
    circle = "class A(Module):\n  a : __torch__.B\nclass B(Module):\n  a : Optional[__torch__.A]\n"
    with pytest.raises(RuntimeFailure, match="in a circle or a chain"):
        scriptcode.check({RECORD: circle})
    scriptcode.check({RECORD: "class A(Module):\n  def f(self: __torch__.A) -> __torch__.A:\n    return self\n"})


def test_long_code_that_is_flat_passes() -> None:
    """The code has many statements, a long list of numbers, and brackets in strings."""
    lines = "".join(f"  x{k} = torch.add(x, torch.mul(x, {k}.5), alpha=-1)\n" for k in range(5000))
    numbers = f"  y = [{', '.join(['-1.5e-3'] * 5000)}]\n"
    text = '  ops.prim.RaiseException("expected (one of [a, b", "torch.Error")\n' * 2000
    scriptcode.check({RECORD: HEAD + lines + numbers + text + RETURN})


@pytest.mark.parametrize("hidden", ["'\"' + {} + '\"'", '# "\n  y = {} + "', '""" " """ + " + {} + "'])
def test_quotes_that_torch_does_not_write_do_not_hide_nesting(hidden: str) -> None:
    with pytest.raises(RuntimeFailure, match="nested deeper"):
        scriptcode.check({RECORD: HEAD + "  y = " + hidden.format("(" * 1100) + "\n" + RETURN})


_LOAD_EACH = """
import sys, warnings
import torch
warnings.simplefilter("ignore")
for path in sys.argv[1:]:
    print(path, flush=True)
    try:
        torch.jit.load(path).graph
    except RuntimeError:
        pass  # torch may reject it, as long as it survives
"""


@pytest.mark.long
def test_torch_survives_the_deepest_code_that_is_accepted(tmp_path: Path) -> None:
    """Code ten times as deep crashes the process: see the docstring of ``bf16kit.runtime.scriptcode``."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch deprecates TorchScript
        saved: Any = torch.jit.script(torch.nn.ReLU())
        torch.jit.save(saved, tmp_path / "relu.pt")
    paths = [str(_with_code(tmp_path, form)) for form in [*FORMS, *CHAINS]]
    done = subprocess.run([sys.executable, "-c", _LOAD_EACH, *paths], capture_output=True, text=True, check=False)
    assert done.stdout.split() == paths  # if the process crashed, the last path printed is the cause
    assert done.returncode == 0


def _with_code(directory: Path, form: str) -> Path:
    """Return a file that :func:`scriptrecords.check` accepts, whose module calls a function or class nested nearly as
    deep as that check allows."""
    limit = 290 if form in CHAINS else 800 if form in ("elif", "blocks", "brackets", "lists", "signs", "not") else 240
    code = (CHAINS[form] if form in CHAINS else FORMS[form])(limit)
    path = directory / f"{form.replace(' ', '_')}.pt"
    with zipfile.ZipFile(directory / "relu.pt") as archive:
        records = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in records.items():
            used = b"__torch__.f0(input)" if form == "functions" else b"__torch__.f(input)"
            archive.writestr(name, data.replace(b"    _0 = ", b"    _1 = " + used + b"\n    _0 = "))
        name = next(name for name in records if "/code/" in name).partition("/code/")[0]
        uses = "def f(x: Tensor) -> Optional[__torch__.C0]:\n  return None\n" if form == "classes" else ""
        archive.writestr(f"{name}/code/__torch__.py", code + uses)
    scriptrecords.check(path)
    return path
