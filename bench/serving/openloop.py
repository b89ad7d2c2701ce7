"""Open-loop load: calls are sent when they are due, whether or not the ones before have been answered.

A closed loop waits for a slow server, and so never shows what happens to those who do not. Here every call's time
counts from the moment it was due, so that a generator or a connection that falls behind is part of what is measured. It
runs as a process of its own, over several plain HTTP/2 connections, and costs about 40 µs per call. The tests that
attack a server use it, too: it tells how each call ended, also where the server or its connection did.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.serving.generator import CODES, NOT_SENT

_NAMES = frozenset(CODES.values())
_ROOT = Path(__file__).parents[2]


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a block of calls: of each, when it was due (:func:`time.monotonic`), the seconds that it took from
    then, and those from when it was sent.

    ``ended`` has them by the name of their status, or a word of :mod:`bench.serving.generator`. ``answers`` counts the
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
        """``of``: answered, served, refused, or the name of a status. NaN when there are none."""
        kinds = {"answered": self.answered, "served": self.served, "refused": self.refused}
        times = sorted(kinds[of] if of in kinds else [took for _, took, _ in self.ended.get(of, [])])
        return times[min(len(times) - 1, int(len(times) * share))] if times else float("nan")


class Offering:
    """Load under way: a process that sends each of ``messages`` in turn, ``rate`` calls a second for ``seconds``.

    They are due evenly spaced; with ``seed``, at random as a Poisson process is, and each is one of ``messages`` drawn.
    """

    def __init__(
        self,
        port: int,
        messages: Sequence[bytes],
        *,
        rate: float,
        seconds: float,
        connections: int = 16,
        seed: int | None = None,
    ) -> None:
        command = [
            sys.executable,
            "-m",
            "bench.serving.generator",
            str(port),
            str(rate),
            str(seconds),
            str(connections),
        ]
        command += [] if seed is None else [str(seed)]
        self._process = subprocess.Popen(
            command, cwd=_ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        assert self._process.stdin is not None
        self._process.stdin.write("\n".join(message.hex() for message in messages))
        self._process.stdin.close()
        self._process.stdin = None

    def outcome(self) -> Outcome:
        """Waits for the end."""
        output, errors = self._process.communicate()
        if self._process.returncode:
            raise RuntimeError(f"the load generator failed: {errors[-2000:]}")
        found: dict[str, Any] = json.loads(output)
        answers = [{bytes.fromhex(answer): count for answer, count in of.items()} for of in found["answers"]]
        return Outcome(found["offered"], found["ended"], answers, found["said"])


def offer(port: int, message: bytes, *, rate: float, seconds: float, connections: int = 16) -> Outcome:
    """Send ``message`` to ModelInfer ``rate`` times a second for ``seconds``, from another process."""
    return Offering(port, [message], rate=rate, seconds=seconds, connections=connections).outcome()
