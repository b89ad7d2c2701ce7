"""Threads that call a function in parallel, each again as soon as its call has returned."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from service.commands.interleaved import Turn


def concurrent_calls(call: Callable[[], object], callers: int, rows: int) -> Callable[[float], Turn]:
    """Return a measurement with ``callers`` threads, whose calls have ``rows`` rows each.

    An exception of a call ends the turn, and is raised by the measurement.
    """

    def run(seconds: float) -> Turn:
        latencies_by_caller: list[list[float]] = [[] for _ in range(callers)]
        failed: list[BaseException] = []
        start = time.perf_counter()
        stop = threading.Event()

        def work(latencies: list[float]) -> None:
            try:
                while True:
                    started = time.perf_counter()
                    call()
                    now = time.perf_counter()
                    latencies.append(now - started)
                    if now - start >= seconds or stop.is_set():
                        return
            except BaseException as error:  # noqa: BLE001 - for the thread that waits
                failed.append(error)
                stop.set()

        threads = [threading.Thread(target=work, args=(latencies,), daemon=True) for latencies in latencies_by_caller]
        try:
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        finally:
            stop.set()  # Ctrl-C interrupts this thread only: end the others
        if failed:
            raise failed[0]
        calls = [second for latencies in latencies_by_caller for second in latencies]
        return Turn(calls, rows * len(calls), time.perf_counter() - start)

    return run
