"""The parts of a check, and how it reports that a server broke a rule."""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import TYPE_CHECKING

import grpc
from google.protobuf.message import Message

from oip_conformance.target import rpc_of

if TYPE_CHECKING:
    from oip_conformance.session import Session

Code = grpc.StatusCode


class Level(enum.Enum):
    """How binding a rule is. Only MUST and TRITON count as failures."""

    MUST = "MUST"  # written in the protocol, in a declared extension's document, or in gRPC's documents
    TRITON = "TRITON"  # not written, but observed in Triton, so that its clients rely on it
    SHOULD = "SHOULD"  # makes a server pleasant to use; reported, not counted


MUST, TRITON, SHOULD = Level.MUST, Level.TRITON, Level.SHOULD


class Failed(Exception):
    """A rule was broken: what was sent, what was expected, what was received."""

    def __init__(self, expected: str, actual: object, sent: object = "") -> None:
        super().__init__(f"expected {expected}; came {actual}")
        self.expected = expected
        self.actual = str(actual)
        self.sent = str(sent)


class Skipped(Exception):
    """The check does not apply to this server or its models; the text says why."""


@dataclass(frozen=True, slots=True)
class Check:
    """One rule. ``needs`` is the extension that it belongs to; ``source`` says where it is written."""

    id: str
    level: Level
    source: str
    rule: str
    run: Callable[[Session], None]
    needs: str = ""


def check(
    name: str, level: Level, source: str, rule: str, needs: str = ""
) -> Callable[[Callable[[Session], None]], Check]:
    """Make a check of a function that returns, or raises :class:`Failed` or :class:`Skipped`."""
    return lambda run: Check(name, level, source, rule, run, needs)


def must(condition: object, expected: str, actual: object, sent: object = "") -> None:
    """Raise :class:`Failed` unless ``condition``."""
    if not condition:
        raise Failed(expected, actual, sent)


@dataclass(frozen=True, slots=True)
class InvalidCall:
    """A request, and words of which a good rejection contains at least one."""

    message: Message
    keywords: Sequence[str] = ()


def refusal(
    name: str,
    level: Level,
    source: str,
    rule: str,
    codes: Iterable[Code],
    make_call: Callable[[Session], InvalidCall],
    needs: str = "",
) -> tuple[Check, ...]:
    """Return three checks of one call that must be rejected: that it is, with which status, and naming what was wrong.

    The protocol only says that a status other than OK means an error; the particular status is Triton's.
    """
    allowed = tuple(codes)

    def refused(session: Session) -> None:
        call, response = session.call_once(name, make_call)
        must(not response.ok, f"{rpc_of(call.message)} to be rejected", response, call.message)

    def by_code(session: Session) -> None:
        call, response = session.call_once(name, make_call)
        if response.ok:
            raise Skipped("it was answered, which is told of by the check before")
        wanted = " or ".join(code.name for code in allowed)
        must(response.code in allowed, wanted, response, call.message)

    def by_text(session: Session) -> None:
        call, response = session.call_once(name, make_call)
        if response.ok or not call.keywords:
            raise Skipped("there is no rejection to read" if response.ok else "nothing in particular is to be named")
        wanted = " or ".join(repr(word) for word in call.keywords)
        must(any(word in response.details for word in call.keywords), f"a text with {wanted}", response, call.message)

    return (
        Check(name, level, source, rule, refused, needs),
        Check(f"{name}/status", Level.TRITON, "Triton, as observed", f"{rule} Which status.", by_code, needs),
        Check(f"{name}/text", Level.SHOULD, "good manners", f"{rule} The text names what was wrong.", by_text, needs),
    )


def collect(*modules: ModuleType) -> tuple[Check, ...]:
    """Return every check that the modules define, in the order in which they are written."""
    found: list[Check] = []
    for module in modules:
        for value in vars(module).values():
            found.extend([value] if isinstance(value, Check) else [])
            found.extend(v for v in value if isinstance(v, Check)) if isinstance(value, tuple) else None
    return tuple(found)
