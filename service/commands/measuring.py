"""The measurements of `bf16-serve bench`: closed-loop clients of a model that is batched and run as a server does."""

from __future__ import annotations

import statistics
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from typing import NamedTuple

import click

from bf16kit.messages.errors import Bf16kitError
from bf16kit.runtime import available_cpus
from bf16kit.runtime import loading as runtimes
from bf16kit.runtime.ort import kernel
from bf16kit.service.config.serverconfig import ServerConfig
from bf16kit.service.contract import Array, infer
from bf16kit.service.models import loading
from bf16kit.service.models.generation import Generation
from bf16kit.service.models.plan import Plan
from bf16kit.service.request import Request
from bf16kit.service.telemetry.metrics import Metrics

CLIENTS = (1, 4, 16, 64)
TURNS = 5
_WORTHWHILE = 1.03  # the least gain in rate for which more instances or larger batches are worth their latency
_MOST_INSTANCES = 64  # the limit of serving.yaml
_WAITING_BYTES = 200 << 20  # of all clients' inputs: more might find the queue full
_CLOSE_SECONDS = 30.0


class Setting(NamedTuple):
    """Keys of serving.yaml."""

    profile: str
    instances: int
    max_batch_size: int  # 0: the model has no batch axis


@dataclass(slots=True)
class Row:
    """What a number of clients, which wait for each answer, measured in several turns: seconds per call, and in all."""

    setting: Setting
    clients: int
    turns: list[tuple[list[float], float]] = field(default_factory=list)

    @property
    def rates(self) -> list[float]:
        """Rows per second of each turn."""
        return [len(latencies) / seconds for latencies, seconds in self.turns]

    @property
    def rate(self) -> float:
        return statistics.median(self.rates)

    def percentile(self, share: float) -> float:
        """Return this percentile of the seconds of all calls. With few calls, the p99 is the slowest one."""
        latencies = sorted(second for turn, _ in self.turns for second in turn)
        return latencies[min(len(latencies) - 1, int(share * len(latencies)))]

    @property
    def p99(self) -> float:
        return self.percentile(0.99)


class Bench:
    """Measures one version of a model. Each step varies one setting, and the best is kept for the next.

    ``feeds`` is one row; ``target`` is the largest p99 in seconds. In any case :meth:`close` it.
    """

    def __init__(self, plan: Plan, config: ServerConfig, feeds: Mapping[str, Array], target: float) -> None:
        """Load the model as a server does. Raises the error that prevents loading it."""
        self._plan, self._config, self._feeds, self._target = plan, config, feeds, target
        self.skipped: list[str] = []
        self.steps: dict[str, list[Row]] = {}  # by the setting that a step varies
        self._load = partial(loading.load, plan.path, device=config.device, threads=config.threads)
        loaded = self._load(plan.serving)
        self._opened, self.info = loaded.opened, loaded.info
        self.now = self.best = Setting(loaded.info.profile, plan.serving.instances, loaded.opened.max_batch_size)
        self._loaded = {self.now[:2]: loaded}
        self._models: dict[Setting, Generation] = {}

    def close(self) -> None:
        for model in self._models.values():
            model.close(time.monotonic() + _CLOSE_SECONDS)
        for loaded in self._loaded.values():
            loaded.close()

    def run(self, sizes: Sequence[int], seconds: float) -> None:
        """Measure for about ``seconds``. ``sizes`` are the batch sizes; none if the model has no batch axis."""
        names, _ = runtimes.choose_profiles(self._opened.artifact, self._plan.serving.profile, self._config.device)
        emulated = () if kernel.multiplies_bf16() else ("cpu-bf16",)  # slower than cpu on every processor
        profiles = dict.fromkeys((self.now.profile, *(name for name in names if name not in emulated)))
        instances = {self.now.instances, 1, 2, 4}
        if self.info.device == "cpu":
            cores = min(available_cpus(), _MOST_INSTANCES)
            instances = {self.now.instances, cores, *(1 << power for power in range(cores.bit_length()))}
        seconds /= 2 + bool(sizes)
        self._step("profile", [self.best._replace(profile=name) for name in profiles], seconds)
        self._step("instances", [self.best._replace(instances=count) for count in sorted(instances)], seconds)
        if sizes:
            self._step("max_batch_size", [self.best._replace(max_batch_size=rows) for rows in sizes], seconds)

    def best_row(self, setting: Setting) -> Row:
        """Return what the last step measured: of several clients, or else one, the best rate within the target.

        If no number of clients is within the target, the row that is closest to it.
        """
        rows = [row for row in list(self.steps.values())[-1] if row.setting == setting]
        within = [row for row in rows if row.p99 <= self._target]
        if within:
            return max(within, key=lambda row: (row.clients > 1, row.rate))
        return min(rows, key=lambda row: row.p99)

    def _step(self, name: str, settings: list[Setting], seconds: float) -> None:
        """Measure the settings, the one to prefer first, and the current ones; keep the first that is good enough."""
        opened = {setting: self._open(setting) for setting in dict.fromkeys((*settings, self.now))}
        models = {setting: model for setting, model in opened.items() if model is not None}
        nbytes = sum(array.nbytes for array in self._feeds.values())
        clients = [count for count in CLIENTS if count * nbytes <= _WAITING_BYTES] or [1]
        rows = self.steps[name] = [Row(setting, count) for setting in models for count in clients]
        for row in rows:
            self._turn(models[row.setting], row.clients, 0.0)  # the first is slower, and not counted
        with click.progressbar(length=len(rows) * TURNS, label=name, file=sys.stderr) as bar:
            for turn in range(TURNS):  # in turns, so that changes in the machine's speed affect all alike
                for row in rows if turn % 2 == 0 else reversed(rows):
                    row.turns.append(self._turn(models[row.setting], row.clients, seconds / (len(rows) * TURNS)))
                    bar.update(1)
        best = {setting: self.best_row(setting) for setting in models}
        rates = {setting: row.rate for setting, row in best.items() if row.p99 <= self._target}
        self.best = min(best, key=lambda setting: best[setting].p99)
        if rates:
            self.best = next(each for each, rate in rates.items() if rate * _WORTHWHILE >= max(rates.values()))

    def _turn(self, model: Generation, clients: int, seconds: float) -> tuple[list[float], float]:
        """Have ``clients`` threads call the model, each again as soon as it is answered, once at least."""
        latencies: list[float] = []
        stop, start = threading.Event(), time.perf_counter()

        def call() -> None:
            while not stop.is_set():
                began = time.perf_counter()
                infer(model, Request(feeds=dict(self._feeds)))
                now = time.perf_counter()
                latencies.append(now - began)
                if now - start >= seconds:
                    return

        with ThreadPoolExecutor(clients) as pool:
            try:
                for future in [pool.submit(call) for _ in range(clients)]:
                    future.result()
            finally:
                stop.set()  # Ctrl-C interrupts this thread only: end the others
        return latencies, time.perf_counter() - start

    def _open(self, setting: Setting) -> Generation | None:
        """Return the model with this setting; None, with the reason in ``skipped``, if it cannot be loaded."""
        if setting in self._models:
            return self._models[setting]
        # The queue has room for all clients, however long they wait.
        keys = {**setting._asdict(), "max_queue_size": max(CLIENTS), "max_queue_ms": 3_600_000.0}
        serving = self._plan.serving.model_copy(update=keys)
        try:
            loaded = self._loaded.get(setting[:2]) or self._load(serving)
        except Bf16kitError as error:
            self.skipped.append(f"profile {setting.profile} with {setting.instances} instances: {error}")
            return None
        self._loaded[setting[:2]] = loaded  # models with other batch sizes share it
        loaded = replace(loaded, opened=replace(loaded.opened, max_batch_size=setting.max_batch_size))
        name, version = self._plan.path.parent.name, self._plan.version
        model = Generation(name, version, loaded, serving, partial(Metrics().add, name, version))
        self._models[setting] = model
        return model
