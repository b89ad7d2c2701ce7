"""The server as one process: ports, models and the stop signal, wired."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from service.drift.owner import FallbackOwner
from service.grpcport import build_transport, drain, extensions, guarded, open_tracing
from service.httpport import announce, open_http
from service.models.controller import Controller
from service.models.deciding import OneServer
from service.models.listing import Listing
from service.models.poll import Poll
from service.models.repository import Repository
from service.models.retries import Retries
from service.operations import Operations, Settings
from service.process.config import ServerConfig
from service.process.credentials import Credentials
from service.process.heap import HeapTrimmer
from service.process.logsettings import LogSettings
from service.process.stop import Ending, Started, Stop
from service.process.ticking import Ticking
from service.shadow.counting import CountingBoth
from service.shadow.handing import PlannedHand
from service.shadow.process import ShadowProcess
from service.sharedmemory import open_regions
from service.status_http.evidence import evidence_route
from service.status_http.pages import routes
from service.status_http.server import HttpServer
from service.status_http.views import Status
from service.telemetry.history import NAMES, TICK_SECONDS, History
from service.telemetry.metrics import Metrics
from service.transport.server import Transport

if TYPE_CHECKING:
    from service.telemetry.tracing import Tracing

_log = logging.getLogger(__name__)
_TEND_SECONDS = 0.1
_LAST_TRACES_SECONDS = 3.0  # that a stop waits for a collector, at most


def serve_alone(config: ServerConfig, stop: Stop, started: Started) -> Ending:
    """Serve until ``stop`` is set, then drain. Answers (live, not ready) while the models load in the background.

    Raises ConfigError for a port in use.
    """
    metrics = Metrics()
    owner = FallbackOwner(OneServer(lambda: repository), lambda *version: shadow.restart(*version))
    shadow, counting = _shadow(config, metrics, lambda: repository, owner)
    repository = Repository(
        metrics,
        device=config.device,
        threads=config.threads,
        ready_when_empty=config.model_control == "explicit",
        hand=lambda name, plan: PlannedHand(name, plan, shadow.ask, shadow.forget),
        hear=owner.hear,
    )
    controller = Controller(
        config.repository,
        repository.want,
        repository.desire,
        config.model_control,
        config.load_model,
        Retries(repository.models),
    )
    controller.begin()
    credentials = Credentials.of(config)
    traces, tracing = open_tracing(config, repository, metrics.traced)
    operations = _operations(config, repository, controller, traces)
    transport = build_transport(config, repository, metrics.refused, credentials, operations, tracing)
    history = History(lambda: counting.samples(NAMES))
    status = Status(repository, history, why_off=shadow.why_off)
    evidence = evidence_route(repository, shadow.evidence if config.evidence else None)
    http = open_http(config, routes(repository, counting, status.look, evidence), metrics, credentials)
    try:
        grpc_port = transport.start()
    except BaseException:
        http.close()
        raise
    status.listening(grpc_port, http.port)
    http.start()
    announce(config, grpc_port, http.port)
    for model in repository.models():
        _log.info("%s: %s", model.label, model.state)
    started(grpc_port, http.port)
    repository.start()
    poll = Poll(controller, config.poll_seconds)
    if config.model_control == "poll":
        poll.start()
    if tracing is not None:
        tracing.start()
    heap = HeapTrimmer()
    heap.start()
    ticking = Ticking("history", TICK_SECONDS, history.tick)
    ticking.start()
    try:
        while not stop.wait(_TEND_SECONDS):
            shadow.tend()
            owner.tend()
        ticking.stop()
        heap.stop()
        poll.stop()
        return _drain(config, repository, transport, http, tracing)
    finally:
        shadow.close()


def _shadow(
    config: ServerConfig, metrics: Metrics, repository: Callable[[], Repository], owner: FallbackOwner
) -> tuple[ShadowProcess, CountingBoth]:
    """The process with the references, there once it is needed, and what it and this one count together."""
    counting = CountingBoth(
        metrics, lambda: shadow.ask_counts(), lambda: [(slot.name, slot.version) for slot in repository().models()]
    )
    shadow = ShadowProcess(config, counting.hear, counting.lost, owner.hear, forgotten=counting.forget)
    return shadow, counting


def _operations(config: ServerConfig, repository: Repository, controller: Controller, traces: Settings) -> Operations:
    logs = LogSettings(config.log_level, config.log_format)
    return Operations(
        models=Listing(repository, controller),
        control=controller if config.model_control == "explicit" else None,
        regions=open_regions(config),
        logs=guarded(config, logs),
        traces=guarded(config, traces),
        extensions=extensions(config),
    )


def _drain(
    config: ServerConfig, repository: Repository, transport: Transport, http: HttpServer, tracing: Tracing | None
) -> Ending:
    """Not ready, then no new work, then what is at work finishes; the HTTP port answers to the last."""
    if config.lame_duck_seconds:
        _log.info("stopping: not ready, and at work for another %g s", config.lame_duck_seconds)
        repository.retire()
        time.sleep(config.lame_duck_seconds)  # a second signal ends the process at once
    begun = time.monotonic()
    _log.info("draining for up to %g s", config.drain_seconds)
    ending = drain(repository, transport, config.drain_seconds)
    if tracing is not None:
        tracing.close(min(_LAST_TRACES_SECONDS, max(1.0, begun + config.drain_seconds - time.monotonic())))
    http.close()
    if not ending.answered:
        _log.warning("requests were cut off: they were still at work after %g s", config.drain_seconds)
    _log.info("stopped after %.2f s", time.monotonic() - begun)
    return ending
