"""Bare runtimes in a process of their own: what a served model's rows per second are held against.

No gRPC, no queue, no clients: threads that each run one batch over and over, on the runtime that the server loads for
the same profile. ``python -m bench.serving.sessions ARTIFACT PROFILE`` reads a layout and a batch a line, and answers
with rows per second. Sessions are kept, so turns of one layout cost no load.
"""

from __future__ import annotations

import sys
import threading
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from bench.core import models
from bench.core.child import Child, answer_all, module
from bf16kit.artifact.artifact import Artifact
from bf16kit.runtime import Runtime, loading


@dataclass(frozen=True, slots=True)
class Batches:
    """``at_once`` threads, each with batches of ``rows`` of ``tokens``; ``shared``: on one session of ``threads``,
    otherwise each on a session of its own."""

    at_once: int
    threads: int
    rows: int
    tokens: int
    shared: bool = False

    @property
    def name(self) -> str:
        where = "on one session" if self.shared else "each on a session"
        return f"{self.at_once} at once of {self.rows} × {self.tokens}, {where} of {self.threads} threads"


class Sessions(Child):
    """The process."""

    def __init__(self, artifact: Path, profile: str) -> None:
        super().__init__(module("bench.serving.sessions", str(artifact), profile))

    def rate(self, batches: Batches, seconds: float) -> float:
        """Rows per second over about ``seconds``, after one run of each thread that does not count."""
        return float(self.ask([asdict(batches), seconds]))


# --- inside the process -----------------------------------------------------------------------------------------------


class _Runner:
    def __init__(self, artifact: Artifact, profile: str) -> None:
        self._artifact = artifact
        self._profile = profile
        self._kept: dict[int, list[Runtime]] = {}  # by threads

    def rate(self, batches: Batches, seconds: float) -> float:
        feeds = models.minilm_feeds(batches.rows, batches.tokens)
        runtimes = self._runtimes(1 if batches.shared else batches.at_once, batches.threads)
        start = threading.Barrier(batches.at_once + 1)
        runs, ended = [0] * batches.at_once, [0.0] * batches.at_once
        started = 0.0

        def work(index: int) -> None:
            runtime = runtimes[index % len(runtimes)]
            runtime.run(feeds)
            start.wait()
            until = time.perf_counter() + seconds
            while time.perf_counter() < until:
                runtime.run(feeds)
                runs[index] += 1
            ended[index] = time.perf_counter()

        threads = [threading.Thread(target=work, args=(index,)) for index in range(batches.at_once)]
        for thread in threads:
            thread.start()
        start.wait()
        started = time.perf_counter()
        for thread in threads:
            thread.join()
        return sum(count * batches.rows / (end - started) for count, end in zip(runs, ended, strict=True))

    def _runtimes(self, count: int, threads: int) -> list[Runtime]:
        kept = self._kept.setdefault(threads, [])
        while len(kept) < count:
            kept.append(loading.load(self._artifact, self._profile, device="cpu", threads=threads))
        return kept[:count]


def _main(artifact: str, profile: str) -> None:
    runner = _Runner(Artifact.open(Path(artifact)), profile)
    answer_all(lambda asked: runner.rate(Batches(**asked[0]), asked[1]))


if __name__ == "__main__":
    _main(*sys.argv[1:])
