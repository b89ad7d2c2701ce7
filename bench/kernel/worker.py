"""``python -m bench.kernel.worker``: a process that holds some sides open and runs one of them when told to.

Its requests and answers are those of :mod:`bench.core.child`.
"""

from __future__ import annotations

import gc
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bench.core.child import answer_all
from bench.kernel.hosts import Absent, Feeds, Prepare, Run, Subject
from bench.kernel.sides import side

_ASLEEP = 0.1  # share of one processor
_LOOK_S, _PATIENCE_S = 0.003, 0.3
_LEAST_CACHE = 32 << 20
_SLOW_S = 0.05  # of a run this long nobody sees whether the threads had to be woken


class Worker:
    """The open sides, and the runs that each is prepared for."""

    def __init__(self) -> None:
        self._open: dict[str, Prepare] = {}
        self._runs: dict[str, Run] = {}
        self._usual: dict[str, float] = {}
        self._flush = np.ones(3 * last_level_cache() // 8)

    def answer(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Do what is asked. A side that fails says why, and does not end the others."""
        act: Callable[[Mapping[str, Any]], dict[str, Any]] = getattr(self, request["do"])
        gc.collect()
        gc.disable()  # it costs milliseconds when it comes
        try:
            return act(request)
        except Exception as error:  # noqa: BLE001 - other people's programs raise what they like
            if not isinstance(error, Absent):
                print(f"{request['side']}: {error!r}", file=sys.stderr)
            return {"absent": (str(error).strip() or type(error).__name__).splitlines()[0][:200]}
        finally:
            gc.enable()

    def open(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Load the model."""
        requested = side(request["side"])
        host = import_module(f"bench.kernel.hosts.{requested.host}")
        self._open[requested.name] = host.open_side(requested.options, Subject.from_dict(request["subject"]))
        return {}

    def feed(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Prepare a side for inputs and run it twice; its outputs go to the file ``out``, where there is one."""
        name = request["side"]
        self._runs.pop(name, None)
        run = self._open[name](_feeds(request["feeds"]), request["operations"])
        result = run()
        if request["out"] and not side(name).limit:
            np.save(request["out"], first_output(result))
        self._runs[name] = run
        self._usual[name] = self._seconds(name)
        return {"seconds": self._usual[name]}

    def time(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Seconds of ``runs`` runs, the first after one that does not count; ``cold``: the caches are emptied before
        each. Answers once this process sleeps."""
        name = request["side"]
        if self._usual[name] < _SLOW_S:
            self._runs[name]()
        seconds = []
        for _ in range(request["runs"]):
            if request["cold"]:
                self._flush.sum()
            seconds.append(self._seconds(name))
        settle()
        return {"seconds": seconds}

    def outputs(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """What a side makes of each of ``feeds``, files of inputs; into the file ``out``."""
        prepare = self._open[request["side"]]
        np.savez(request["out"], *(first_output(prepare(_feeds(file), 0.0)()) for file in request["feeds"]))
        return {}

    def _seconds(self, name: str) -> float:
        started = time.perf_counter()
        result = self._runs[name]()
        elapsed = time.perf_counter() - started
        return float(result) if side(name).limit else elapsed


def _feeds(file: str) -> Feeds:
    with np.load(file) as stored:
        return {key: stored[key] for key in stored.files}


def settle() -> None:
    """Wait until the threads that wait busily have fallen asleep: they would take a core from whoever is next."""
    until = time.perf_counter() + _PATIENCE_S
    while time.perf_counter() < until:
        used, started = time.process_time(), time.perf_counter()
        time.sleep(_LOOK_S)
        if time.process_time() - used < _ASLEEP * (time.perf_counter() - started):
            return


def last_level_cache() -> int:
    """Bytes of the largest cache of the first processor; 32 MiB where the system does not say."""
    sizes = [_LEAST_CACHE]
    for file in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"):
        with suppress(OSError, ValueError):
            sizes.append(int(file.read_text().strip().removesuffix("K")) << 10)
    return max(sizes)


def first_output(result: Any) -> NDArray[np.float32]:
    """What a run returned first, whichever side it is of."""
    result = getattr(result, "last_hidden_state", result)  # transformers' outputs
    if not hasattr(result, "shape"):
        result = next(iter(result.values())) if hasattr(result, "values") else next(iter(result))
    if hasattr(result, "float"):
        result = result.float().numpy()
    return np.array(result, np.float32)


if __name__ == "__main__":
    answer_all(Worker().answer)
