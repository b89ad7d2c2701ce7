"""Call the operators that programs may use with random arguments. A call may crash this process.

``python -m operatorcalls SEED COUNT [NAME …]`` prints each operator's name before its calls, so that the last line
shows which operator crashed the process. At the end it prints ``done``.
"""

from __future__ import annotations

import random
import resource
import sys
import warnings
from pathlib import Path
from typing import Any

import torch

from bf16kit.runtime.exported import operators
from bf16kit.runtime.exportedguards import with_argument_checks

_MEMORY = 3 << 30  # bytes that a call may allocate
_SIZES = (0, 1, 2, 3, 4, 5, 8, 17)
_INTEGERS = (-(2**63), -(2**31), -5, -2, -1, 0, 1, 2, 3, 4, 5, 16, 100, 2**20, 2**31, 2**40, 2**63 - 1)
_FLOATS = (float("nan"), float("inf"), -float("inf"), -1.0, 0.0, 1e-30, 1e-6, 0.5, 1.0, 2.0, 1e6, 1e30)
_WORDS = ("none", "tanh", "constant", "reflect", "sum", "mean", "floor", "trunc", "left", "ij->ji", "ij", "bilinear")
_DTYPES = (torch.float32, torch.float32, torch.float32, torch.int64, torch.bool, torch.bfloat16, torch.uint8)


class Caller:
    """Draws random arguments. Tensors hold small numbers, and sometimes extreme ones."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)

    def tensor(self, shape: list[int] | None = None) -> torch.Tensor:
        draw = self.random
        if shape is None:
            shape = draw.choices(_SIZES, k=draw.choice((0, 1, 1, 2, 2, 3, 4, 5)))
        dtype = draw.choice(_DTYPES)
        found = (torch.randn(shape) * 4).abs().to(dtype)
        if found.numel() and draw.random() < 0.1 and dtype is torch.int64:
            found.view(-1)[0] = draw.choice(_INTEGERS)
        return found.mT if found.dim() > 1 and draw.random() < 0.1 else found

    def integer(self) -> int:
        return self.random.choice(_INTEGERS if self.random.random() < 0.3 else (0, 1, 2, 3, 4, 8, 17))

    def value(self, kind: str, shape: list[int]) -> Any:
        draw = self.random
        if kind.startswith("Optional["):
            return None if draw.random() < 0.4 else self.value(kind[9:-1], shape)
        if kind.startswith("List["):
            return [self.value(kind[5:-1], shape) for _ in range(draw.choice((0, 1, 2, 2, 3, 4)))]
        if kind == "ScalarType" and draw.random() < 0.8:
            return draw.choice(_DTYPES)
        if kind in ("ScalarType", "MemoryFormat", "Layout"):
            return self.integer()  # a program must not pass an integer here
        if kind == "Tensor":
            return self.tensor(shape if draw.random() < 0.5 else None)
        plain = {
            "int": self.integer,
            "SymInt": self.integer,
            "float": lambda: draw.choice(_FLOATS),
            "bool": lambda: draw.random() < 0.5,
            "number": lambda: draw.choice((self.integer(), draw.choice(_FLOATS))),
            "str": lambda: draw.choice(_WORDS),
        }
        return plain[kind]() if kind in plain else None  # type: ignore[no-untyped-call]


def call(name: str, seed: int, count: int) -> int:
    """Call the operator ``name`` ``count`` times. Return how many calls succeeded; the others raised."""
    caller = Caller(seed)
    packet = getattr(torch.ops.aten, name)
    overloads = [getattr(packet, each) for each in packet.overloads() if "out" not in each.split("_")]
    overloads = [each for each in overloads if name.endswith("_") or not _writes(each)]
    answered = 0
    for _ in range(count):
        overload = caller.random.choice(overloads)
        shape = caller.random.choices(_SIZES, k=caller.random.choice((1, 2, 3, 4)))
        arguments = [each for each in overload._schema.arguments if not _default(caller, each)]
        args = [caller.value(str(each.real_type), shape) for each in arguments if not each.kwarg_only]
        if len(args) < sum(not each.kwarg_only for each in overload._schema.arguments):
            args = args[: next((i for i, each in enumerate(overload._schema.arguments) if each not in arguments), None)]
        try:
            with_argument_checks(name, overload, overload)(*args)
            answered += 1
        except Exception:  # noqa: BLE001 - an operator may raise anything, but must not crash the process
            continue
    return answered


def _default(caller: Caller, argument: Any) -> bool:
    return bool(argument.has_default_value() and caller.random.random() < 0.2)


def _writes(overload: Any) -> bool:
    return any(each.alias_info is not None and each.alias_info.is_write for each in overload._schema.arguments)


def _say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def main(seed: int, count: int, names: list[str]) -> None:
    """Call each of ``names``, or every operator if none is given."""
    warnings.simplefilter("ignore")
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    torch.set_num_threads(1)
    torch.zeros(1)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + _MEMORY, used + _MEMORY))
    for name in names or sorted(operators.ATEN | operators.IN_PLACE):
        _say(name)
        with torch.inference_mode():
            _say(f"{name} {call(name, seed, count)}")
    _say("done")


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3:])
