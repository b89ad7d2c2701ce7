"""The decisions of a plan on a node or a tensor, their reasons, and what overrides the plan's own rules."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from bf16kit.messages.errors import UsageError

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


@dataclass(frozen=True, slots=True)
class Overrides:
    """Patterns searched in the names of nodes and tensors, and the islands of a search.

    If patterns of both kinds match, fp32 wins, because it is the safer one.
    """

    keep_fp32: tuple[re.Pattern[str], ...] = ()
    bf16: tuple[re.Pattern[str], ...] = ()
    islands: Islands = field(default_factory=Islands)

    @classmethod
    def parse(
        cls, keep_fp32: Iterable[str] = (), bf16: Iterable[str] = (), islands: Islands | None = None
    ) -> Overrides:
        """Compile the patterns; raise UsageError for one that is not a regular expression."""
        return cls(_compile("--keep-fp32", keep_fp32), _compile("--bf16", bf16), islands or Islands())

    def node_override(self, name: str) -> Decision | None:
        """Return why the node ``name`` stays fp32, if the user or the search says so."""
        return _kept(self.keep_fp32_pattern(name), self.islands.nodes.get(name))

    def tensor_override(self, name: str, readers: Iterable[str]) -> Decision | None:
        """Return why the tensor ``name``, read by ``readers``, stays fp32, if the user or the search says so."""
        pattern = next((p for each in (name, *readers) if (p := self.keep_fp32_pattern(each)) is not None), None)
        return _kept(pattern, self.islands.tensors.get(name))

    def keep_fp32_pattern(self, name: str) -> str | None:
        """Return the ``--keep-fp32`` pattern that matches ``name``, if any."""
        return _first(self.keep_fp32, name)

    def bf16_pattern(self, name: str) -> str | None:
        """Return the ``--bf16`` pattern that matches ``name``, if any; None if ``--keep-fp32`` matches too."""
        return None if self.keep_fp32_pattern(name) is not None else _first(self.bf16, name)

    def check(self, names: Collection[str]) -> None:
        """Raise UsageError for a pattern that matches none of ``names``: most likely a typing error."""
        for flag, patterns in (("--keep-fp32", self.keep_fp32), ("--bf16", self.bf16)):
            for pattern in patterns:
                if not any(pattern.search(name) for name in names):
                    raise UsageError(
                        f"{flag} {pattern.pattern}: matches no node or tensor of the model; to see the names,"
                        " convert without it and run `bf16-convert inspect`"
                    )


def _kept(pattern: str | None, island: str | None) -> Decision | None:
    if pattern is not None:
        return Decision("fp32", "kept", f"kept in fp32 by --keep-fp32 {pattern}")
    return None if island is None else Decision("fp32", "budget", island)


def _compile(flag: str, patterns: Iterable[str]) -> tuple[re.Pattern[str], ...]:
    compiled = []
    for pattern in patterns:
        try:
            compiled.append(re.compile(pattern))
        except re.error as error:
            raise UsageError(f"{flag} {pattern}: not a regular expression: {error}") from None
    return tuple(compiled)


def _first(patterns: Iterable[re.Pattern[str]], name: str) -> str | None:
    return next((pattern.pattern for pattern in patterns if pattern.search(name)), None)
