"""Code whose functions call one another in longer chains than torch survives is rejected before torch compiles it."""

from __future__ import annotations

import zipfile
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from deepscript import first_crash, with_code

from bf16kit.messages.errors import RuntimeFailure
from bf16kit.runtime import scriptcalls, scriptrecords

TOO_LONG = "functions in a chain, expected at most 500"
CIRCLE = "need one another in a circle"


def _module(*codes: str) -> list[tuple[str, str]]:
    return [("__torch__", code) for code in codes]


def _functions(names: list[str]) -> str:
    calls = {name: f"__torch__.{following}(x)" for name, following in pairwise(names)}
    return "".join(f"def {name}(x: Tensor) -> Tensor:\n  return {calls.get(name, 'x')}\n" for name in names)


def _class(body: str, *methods: str) -> str:
    head = "class M(Module):\n  __parameters__ = []\n  __buffers__ = []\n  training : bool\n"
    return head + body + "".join(f"  def {each}" for each in methods)


def _method(name: str, result: str, receiver: str = "self") -> str:
    return f"{name}({receiver}: __torch__.M,\n    x: Tensor) -> Tensor:\n    return {result}\n"


def _methods(call: Callable[[int], str], count: int) -> str:
    """Return a class whose method ``f0`` returns ``x``, and each further one what ``call`` says of its number."""
    return _class("", *(_method(f"f{k}", call(k) if k else "x") for k in range(count)))


# Each takes a number of functions and returns code in which each calls the next.
CHAINS: dict[str, Callable[[int], str]] = {
    "functions": lambda n: _functions([f"f{k}" for k in range(n)]),
    "functions, the last one first": lambda n: _functions([f"f{k}" for k in range(n)][::-1]),
    "classes": lambda n: (
        "".join(f"class C{k}(NamedTuple):\n  a : __torch__.C{k + 1}\n" for k in range(n - 1))
        + f"class C{n - 1}(NamedTuple):\n  a : Tensor\n"
    ),
    "methods": lambda n: _methods(lambda k: f"(self).f{k - 1}(x, )", n),
    "methods, the last one first": lambda n: _class(
        "", *(_method(f"f{k}", f"(self).f{k - 1}(x, )" if k else "x") for k in reversed(range(n)))
    ),
    "methods without brackets": lambda n: _methods(lambda k: f"self.f{k - 1}(x)", n),
    "methods by getattr": lambda n: _methods(lambda k: f'getattr(self, "f{k - 1}")(x)', n),
}


@pytest.mark.parametrize("chain", CHAINS)
def test_a_chain_is_rejected_beyond_the_limit_only(chain: str) -> None:
    scriptcalls.check(_module(CHAINS[chain](scriptcalls.LONGEST)))
    with pytest.raises(RuntimeFailure, match=TOO_LONG):
        scriptcalls.check(_module(CHAINS[chain](scriptcalls.LONGEST + 1)))


def test_the_chains_of_nested_classes_add_up() -> None:
    """A method of the outer class may call the longest chain of the inner one."""
    outer = CHAINS["methods"](300).replace("M", "A").replace("training : bool", "training : bool\n  b : __torch__.B")
    inner = CHAINS["methods"](201).replace("M", "B")
    with pytest.raises(RuntimeFailure, match="its code may call 501 functions in a chain"):
        scriptcalls.check(_module(outer, inner))
    scriptcalls.check(_module(outer, CHAINS["methods"](200).replace("M", "B")))


@pytest.mark.parametrize(
    "code",
    [
        _methods(lambda k: f"me.f{k - 1}(x)\n    me = self", 501),
        _methods(lambda k: f"([self])[0].f{k - 1}(x)", 501),
        _class("", *(_method(f"f{k}", f"(me).f{k - 1}(x, )" if k else "x", "me") for k in range(501))),
        _class("  other : Optional[__torch__.M]\n", *(_method(f"f{k}", "x") for k in range(501))),
    ],
    ids=["another name", "in a list", "another parameter", "an attribute of its own class"],
)
def test_methods_that_may_call_one_another_unseen_count_as_a_chain(code: str) -> None:
    with pytest.raises(RuntimeFailure, match=TOO_LONG):
        scriptcalls.check(_module(code))


def test_definitions_whose_names_differ_in_case_alone_count_as_one() -> None:
    code = CHAINS["methods"](300)
    with pytest.raises(RuntimeFailure, match=TOO_LONG):
        scriptcalls.check(_module(code, code.replace("M", "m")))


def test_a_chain_through_modules_and_a_circle_are_rejected() -> None:
    modules = [(f"__torch__.m{k}", f"class C(Module):\n  a : __torch__.m{k + 1}.C\n") for k in range(501)]
    with pytest.raises(RuntimeFailure, match=TOO_LONG):
        scriptcalls.check(modules)
    with pytest.raises(RuntimeFailure, match=CIRCLE):
        scriptcalls.check(_module("class A(Module):\n  a : __torch__.B\nclass B(Module):\n  a : __torch__.A\n"))
    itself = "class A(Module):\n  def f(self: __torch__.A) -> __torch__.A:\n    return self\n"
    scriptcalls.check(_module(itself))


class _Unrolled(torch.nn.Module):
    """Calls a cell of two layers 600 times: a trace has 600 methods of the cell and of each layer."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(600):
            x = self.cell(x)
        return x


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_trace_that_calls_one_module_many_times_is_accepted(tmp_path: Path) -> None:
    path = tmp_path / "unrolled.pt"
    torch.jit.trace(_Unrolled(), torch.ones(1, 4)).save(path)  # type: ignore[no-untyped-call]  # torch's own
    with zipfile.ZipFile(path) as archive:
        code = [archive.read(name) for name in archive.namelist() if name.endswith(".py")]
    assert sum(text.count(b"def forward") for text in code) >= 600
    scriptrecords.check(path)


def _file(path: Path, chain: str, count: int) -> Path:
    """Return a file whose module uses a chain of ``count`` functions."""
    code, first = CHAINS[chain](count), {"functions": 0, "functions, the last one first": count - 1}
    if chain in first:
        return with_code(path, code, f"__torch__.f{first[chain]}(input)")
    kind = "C0" if chain == "classes" else "M"
    return with_code(path, f"{code}def f(x: Tensor) -> Optional[__torch__.{kind}]:\n  return None\n")


@pytest.mark.long
def test_torch_survives_the_longest_chains_that_are_accepted(tmp_path: Path) -> None:
    paths = [_file(tmp_path / f"{number}.pt", chain, scriptcalls.LONGEST - 10) for number, chain in enumerate(CHAINS)]
    for path in paths:
        scriptrecords.check(path)
    assert first_crash(paths) == ""


@pytest.mark.long
@pytest.mark.parametrize("chain", ["functions", "methods, the last one first"])
def test_torch_crashes_at_chains_that_are_rejected(tmp_path: Path, chain: str) -> None:
    """If this fails, torch has a limit of its own now, and ours may go."""
    path = _file(tmp_path / "crashing.pt", chain, 20_000)
    with pytest.raises(RuntimeFailure, match="functions in a chain"):
        scriptrecords.check(path)
    assert first_crash([path]) == str(path)
