"""The decisions of a plan on a node or a tensor, their reasons, and what overrides the plan's own rules."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Literal

from bf16kit.artifact.manifest import PlanEntry
from bf16kit.messages.errors import UsageError


@dataclass(frozen=True, slots=True)
class Decision:
    """The precision of a node or a stored tensor, with a code for programs and a reason for users."""

    precision: Literal["bf16", "fp32"]
    code: str
    reason: str

    def entry(self, name: str, op: str) -> PlanEntry:
        """Return this as the plan stores it."""
        return PlanEntry(name=name, op=op, precision=self.precision, reason=self.reason, code=self.code)


bf16, fp32 = partial(Decision, "bf16"), partial(Decision, "fp32")  # of a code and a reason


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

    keep_fp32: Sequence[re.Pattern[str]] = ()
    bf16: Sequence[re.Pattern[str]] = ()
    islands: Islands = field(default_factory=Islands)

    @classmethod
    def parse(
        cls, keep_fp32: Iterable[str] = (), bf16: Iterable[str] = (), islands: Islands | None = None
    ) -> Overrides:
        """Compile the patterns; raise UsageError for one that is not a regular expression."""
        return cls(_compiled("--keep-fp32", keep_fp32), _compiled("--bf16", bf16), islands or Islands())

    def node_override(self, name: str) -> Decision | None:
        """Return why the node ``name`` stays fp32, if the user or the search says so."""
        return self._kept([name], self.islands.nodes.get(name))

    def tensor_override(self, name: str, readers: Iterable[str]) -> Decision | None:
        """Return why the tensor ``name``, read by ``readers``, stays fp32, if the user or the search says so."""
        return self._kept([name, *readers], self.islands.tensors.get(name))

    def keep_fp32_pattern(self, name: str) -> str | None:
        """Return the ``--keep-fp32`` pattern that matches ``name``, if any."""
        return next((pattern.pattern for pattern in self.keep_fp32 if pattern.search(name)), None)

    def bf16_pattern(self, name: str) -> str | None:
        """Return the ``--bf16`` pattern that matches ``name``, if any; None if ``--keep-fp32`` matches too."""
        found = next((pattern.pattern for pattern in self.bf16 if pattern.search(name)), None)
        return None if self.keep_fp32_pattern(name) is not None else found

    def _kept(self, names: Iterable[str], island: str | None) -> Decision | None:
        pattern = next((p for name in names if (p := self.keep_fp32_pattern(name)) is not None), None)
        if pattern is not None:
            return fp32("kept", f"kept in fp32 by --keep-fp32 {pattern}")
        return None if island is None else fp32("budget", island)

    def check(self, names: Collection[str]) -> None:
        """Raise UsageError for a pattern that matches none of ``names``: most likely a typing error."""
        for flag, patterns in (("--keep-fp32", self.keep_fp32), ("--bf16", self.bf16)):
            for pattern in patterns:
                if not any(pattern.search(name) for name in names):
                    raise UsageError(
                        f"{flag} {pattern.pattern}: matches no node or tensor of the model; to see the names,"
                        " convert without it and run `bf16-convert inspect`"
                    )


def _compiled(flag: str, patterns: Iterable[str]) -> list[re.Pattern[str]]:
    try:
        return [re.compile(pattern) for pattern in patterns]
    except re.error as error:
        raise UsageError(f"{flag} {error.pattern!s}: not a regular expression: {error}") from None
