"""Registering the kernel's library with a runtime that works, fails half way, or has another interface than it says."""

import ctypes
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fakeort import FakeRuntime

from bf16kit.runtime.ort import kernel

_ROOT = Path(__file__).resolve().parents[3]
_ABI = (_ROOT / "kernels/ort/abi.h").read_text("utf-8")
built = pytest.mark.skipif(not kernel.LIBRARY.exists(), reason="the kernel was not built: no C++17 compiler")
_RUNTIMES: list[FakeRuntime] = []  # kept alive: the library uses their addresses as long as it is loaded


def fake(*arguments: Any, **options: Any) -> FakeRuntime:
    _RUNTIMES.append(FakeRuntime(*arguments, **options))
    return _RUNTIMES[-1]


@pytest.fixture
def library() -> ctypes.CDLL:
    return ctypes.CDLL(str(kernel.LIBRARY))


@built
def test_sessions_of_one_runtime_share_a_domain_and_two_runtimes_have_one_each(library: ctypes.CDLL) -> None:
    """A domain is an object of the runtime that created it, and is invalid in another."""
    first, second = fake(), fake("1.24.4")
    for runtime in (first, second, first):
        assert runtime.register(library) == ""
    for runtime, sessions in ((first, 2), (second, 1)):
        (domain,) = runtime.domains
        assert runtime.sessions == [domain] * sessions
        assert runtime.names[domain] == b"bf16kit"
        assert len(runtime.domains[domain]) == len(set(runtime.domains[domain])) > 40


@built
def test_each_list_of_operators_has_a_domain_with_these_alone(library: ctypes.CDLL) -> None:
    runtime = fake()
    for runtime.listed in (b",MatMul,GRU,", b"", b",GRU,", b",MatMul,GRU,", b",MatMul_,NoOperator,"):
        assert runtime.register(library) == ""
    both, every, one, again, none = runtime.sessions
    assert [len(runtime.domains[domain]) for domain in (both, one, none)] == [2, 1, 0]
    assert set(runtime.domains[one]) < set(runtime.domains[both]) < set(runtime.domains[every])
    assert (both, len(runtime.domains)) == (again, 4)
    runtime.listed = b",GRU" * 2000
    assert runtime.register(library) == "the entry bf16kit.operators is too long"
    assert (len(runtime.domains), runtime.errors) == (4, {})


@built
@pytest.mark.parametrize("at", [0, 7])
def test_a_domain_that_could_not_be_filled_is_released_and_made_again(at: int, library: ctypes.CDLL) -> None:
    runtime = fake()
    runtime.fail_at = at
    assert runtime.register(library) == "no room for another operator"
    assert (runtime.domains, runtime.sessions, runtime.errors) == ({}, [], {})
    runtime.fail_at = None
    assert runtime.register(library) == ""
    assert len(runtime.sessions) == len(runtime.domains) == 1


@built
@pytest.mark.parametrize(
    ("version", "said"),
    [
        ("1.20.1", "it needs 1.21 or a later 1.x"),
        ("2.0.0", "it needs 1.21 or a later 1.x"),
        ("main", "does not tell its version"),
    ],
)
def test_an_unknown_release_of_onnx_runtime_is_rejected(version: str, said: str, library: ctypes.CDLL) -> None:
    runtime = fake(version)
    answer = runtime.register(library)
    assert answer.startswith(f"bf16kit kernel: ONNX Runtime {version} ")
    assert said in answer
    assert runtime.sessions == []


def _trusted() -> list[int]:
    """Return the indices of the entries that abi.h declares. Entry 0 is needed to report any error."""
    enum = _ABI.partition("enum Index : size_t {")[2].partition("};")[0]
    return [int(number) for number in re.findall(r"k\w+ = (\d+),", enum)]


@built
@pytest.mark.parametrize("index", [index for index in _trusted() if index != 0])
def test_a_table_with_a_missing_entry_is_rejected(index: int, library: ctypes.CDLL) -> None:
    runtime = fake(replaced={index: None})
    assert "does not have the interface of version 1.21: entries are missing" in runtime.register(library)


def _zero(out: Any) -> None:
    out[0] = 0


_LIES: dict[str, tuple[int, Callable[..., Any], str]] = {
    "the code of an error": (1, lambda _: 5, "an error"),
    "the text of an error": (2, lambda _: None, "an error"),
    "making a tensor": (49, lambda *a: _zero(a[6]), "a tensor"),
    "where a tensor lies": (51, lambda _, out: _zero(out), "a tensor"),
    "a tensor's type": (60, lambda _, out: _zero(out), "a tensor"),
    "how many dimensions": (61, lambda _, out: _zero(out), "a tensor"),
    "which dimensions": (62, lambda _, out, __: _zero(out), "a tensor"),
    "what a tensor is": (65, lambda _, out: _zero(out), "a tensor"),
    "memory": (69, lambda *a: _zero(a[2]), "a tensor"),
    "making a domain": (26, lambda _, out: _zero(out), "no domain"),
}


@built
@pytest.mark.parametrize("lie", _LIES)
def test_an_entry_that_returns_wrong_values_is_detected(lie: str, library: ctypes.CDLL) -> None:
    index, function, said = _LIES[lie]
    runtime = fake(replaced={index: function})
    answer = runtime.register(library)
    assert f"does not have the interface of version 1.21: {said}" in answer
    assert (runtime.tensors, runtime.domains, runtime.errors) == ({}, {}, {})


# --- functions that C calls -------------------------------------------------------------------------------------------


def _compiles(program: str) -> bool:
    source = f'#include "ort/abi.h"\nusing namespace bf16kit::abi;\n{program}\n'
    command = ["g++", "-std=c++17", "-fsyntax-only", "-Ikernels", "-x", "c++", "-"]
    return subprocess.run(command, input=source.encode(), cwd=_ROOT, capture_output=True).returncode == 0


@pytest.mark.skipif(shutil.which("g++") is None, reason="no C++ compiler (Debian: apt-get install g++)")
def test_callbacks_cannot_throw_into_the_runtime() -> None:
    """``noexcept`` is part of the slots' types, so an operator whose function may throw does not compile."""
    slots = re.findall(r"\(\*(\w+)\)\(([^)]*)\)", _ABI.partition("struct CustomOp {")[2].partition("};")[0])
    assert len(slots) == 25
    calls = [f"CustomOp{{}}.{name}({', '.join('{}' for _ in arguments.split(','))})" for name, arguments in slots]
    assert _compiles("".join(f"static_assert(noexcept({call}));\n" for call in calls))
    function = "Status* compute(void*, KernelContext*) {} {{ return nullptr; }} void f(CustomOp& op) {{ op.{} = {}; }}"
    assert _compiles(function.format("noexcept", "KernelComputeV2", "compute"))
    assert not _compiles(function.format("", "KernelComputeV2", "compute"))
