"""The decisions of a plan on a node or a tensor, and the reasons they give."""

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
    "rounds",  # a product that rounds its inputs, in the CPU kernel
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
    """The precision of a node or a stored tensor, with a code for programs and a reason for users."""

    precision: Literal["bf16", "fp32"]
    code: Code
    reason: str


@dataclass(frozen=True, slots=True)
class Islands:
    """The nodes and tensors that stay fp32 because drift would be over budget otherwise: by name, each with its reason.

    A node named here computes in fp32 wherever its profile would compute it in bf16. The weights it reads are still
    stored in bf16, unless they are named too.
    """

    nodes: Mapping[str, str] = field(default_factory=dict)
    tensors: Mapping[str, str] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.nodes or self.tensors)
