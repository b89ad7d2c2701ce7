"""Code nested so deeply that torch would overflow its stack is rejected before torch parses it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from deepscript import first_crash, with_code

from bf16kit.messages.errors import RuntimeFailure
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


@pytest.mark.parametrize("form", FORMS)
def test_a_deep_form_is_rejected_and_a_shallow_one_is_not(form: str) -> None:
    scriptcode.check({RECORD: FORMS[form](90)})
    with pytest.raises(RuntimeFailure, match=r"the code in 'archive/code/__torch__.py' has .* nested deeper than 1000"):
        scriptcode.check({RECORD: FORMS[form](1100)})


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


@pytest.mark.long
def test_torch_survives_the_deepest_code_that_is_accepted(tmp_path: Path) -> None:
    """Code ten times as deep crashes the process: see the docstring of ``bf16kit.runtime.scriptcode``."""
    paths = []
    for number, (form, make) in enumerate(FORMS.items()):
        depth = 800 if form in ("elif", "blocks", "brackets", "lists", "signs", "not") else 240
        paths.append(with_code(tmp_path / f"{number}.pt", make(depth)))
        scriptrecords.check(paths[-1])
    assert first_crash(paths) == ""
