"""Open-loop load: calls are sent when they are due, whether or not the ones before have been answered.

A closed loop waits for a slow server, and so never shows what happens to those who do not. Here every call's time
counts from the moment it was due, so that a generator or a connection that falls behind is part of what is measured. It
runs as a process of its own, over several plain HTTP/2 connections, and costs about 40 µs per call. The tests that
attack a server use it, too: it tells how each call ended, also where the server or its connection did.
"""

from __future__ import annotations

import json
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from bench.core.child import Child, module
from bench.serving import wire
from bench.serving.http2 import CODES, NOT_SENT, Connection, drive

_NAMES = frozenset(CODES.values())
_REMEMBERED = 100  # different answers and texts of errors


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a block of calls: of each, when it was due (:func:`time.monotonic`), the seconds that it took from
    then, and those from when it was sent.

    ``ended`` has them by the name of their status, or a word of :mod:`bench.serving.http2`. ``answers`` counts the
    different answers to each message, ``said`` the texts that came with each status.
    """

    offered: int
    ended: dict[str, list[tuple[float, float, float]]]
    answers: list[dict[bytes, int]]
    said: dict[str, dict[str, int]]

    @property
    def answered(self) -> list[float]:
        """Seconds that the answered calls took."""
        return [took for _, took, _ in self.ended.get("OK", [])]

    @property
    def served(self) -> list[float]:
        """Seconds that the answered calls took since they were sent: without the wait in the client."""
        return [took for _, _, took in self.ended.get("OK", [])]

    @property
    def refused(self) -> list[float]:
        """Seconds that the refused calls took since they were sent."""
        return [took for status, calls in self.ended.items() if status in _NAMES - {"OK"} for _, _, took in calls]

    @property
    def lost(self) -> int:
        """Sent, and neither answered nor refused."""
        return self.offered - len(self.answered) - len(self.refused) - len(self.ended.get(NOT_SENT, []))

    @property
    def counts(self) -> dict[str, int]:
        return {status: len(calls) for status, calls in self.ended.items()}

    def percentile(self, of: str, share: float) -> float:
        """``of``: answered, served or refused. NaN when there are none."""
        times = sorted({"answered": self.answered, "served": self.served, "refused": self.refused}[of])
        return times[min(len(times) - 1, int(len(times) * share))] if times else float("nan")


class Offering:
    """Load under way: a process that sends each of ``messages`` to ModelInfer in turn, ``rate`` calls a second, evenly
    spaced, for ``seconds``."""

    def __init__(
        self, port: int, messages: Sequence[bytes], *, rate: float, seconds: float, connections: int = 16
    ) -> None:
        self._child = Child(module("bench.serving.openloop"))
        self._child.send([port, [message.hex() for message in messages], rate, seconds, connections])

    def outcome(self) -> Outcome:
        """Waits for the end."""
        with self._child as child:
            found: dict[str, Any] = child.answer()
        answers = [{bytes.fromhex(answer): count for answer, count in of.items()} for of in found["answers"]]
        return Outcome(found["offered"], found["ended"], answers, found["said"])


# --- inside the process -----------------------------------------------------------------------------------------------


class _Ledger:
    """How calls ended."""

    def __init__(self, messages: int) -> None:
        self._ended: dict[str, list[tuple[float, float, float]]] = {}
        self._answers = [Counter[bytes]() for _ in range(messages)]
        self._said: dict[str, Counter[str]] = {}

    def end(self, message: int, status: str, due: float, sent: float | None, data: bytes) -> None:
        now = time.monotonic()
        self._ended.setdefault(status, []).append((due, now - due, 0.0 if sent is None else now - sent))
        if status == "OK":
            _count(self._answers[message], data)
        elif data:
            _count(self._said.setdefault(status, Counter()), data.decode("ascii", "replace"))

    def report(self) -> dict[str, Any]:
        offered = sum(map(len, self._ended.values()))
        answers = [{answer.hex(): count for answer, count in of.items()} for of in self._answers]
        return {"offered": offered, "ended": self._ended, "answers": answers, "said": self._said}


def _count(counter: Counter[Any], item: Any) -> None:
    if item in counter or len(counter) < _REMEMBERED:
        counter[item] += 1


def _run(port: int, texts: Sequence[str], rate: float, seconds: float, connections: int) -> dict[str, Any]:
    ledger, messages = _Ledger(len(texts)), [bytes.fromhex(text) for text in texts]
    opened = [Connection(port, wire.INFER, messages, ledger.end) for _ in range(connections)]
    started, total, sent = time.monotonic(), round(rate * seconds), 0

    def offer(now: float) -> float | None:
        nonlocal sent
        while sent < total and (due := started + sent / rate) <= now:
            opened[sent % connections].send(sent % len(messages), due)
            sent += 1
        return None if sent == total else due - now

    drive(opened, offer)
    return ledger.report()


if __name__ == "__main__":
    print(json.dumps(_run(*json.loads(sys.stdin.readline()))), flush=True)
