"""What a plan decides of a node or a tensor, and the words it gives for reasons."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

Code = Literal[
    "asked_for",  # --bf16
    "kept",  # --keep-fp32
    "budget",  # found by the search
    # nodes in bf16
    "product",
    "moves",
    "kernel",
    "looks_up",
    "rounds",  # a product that rounds what it reads, in the CPU kernel
    # nodes in fp32
    "profile",  # the whole profile computes in fp32
    "control_flow",
    "no_floats",
    "normalises",
    "unknown",
    "no_kernel",
    "no_form",
    "not_varying",
    "alone",
    # tensors
    "matrix",
    "vector",
    "small",
    "reference_only",
]


@dataclass(frozen=True, slots=True)
class Decision:
    """The precision a node computes in, or a tensor is stored in, and why: a code for programs, a reason for people."""

    precision: Literal["bf16", "fp32"]
    code: Code
    reason: str


@dataclass(frozen=True, slots=True)
class Islands:
    """What stays fp32 because drift would be over budget otherwise: names of nodes and of tensors, each with why.

    A node named here computes in fp32 wherever its profile would compute it in bf16; the weights it reads are stored in
    bf16 all the same, unless they are named, too.
    """

    nodes: Mapping[str, str] = field(default_factory=dict)
    tensors: Mapping[str, str] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.nodes or self.tensors)
