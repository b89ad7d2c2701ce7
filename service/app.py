"""The server, wired: the one place where configuration, sockets, models and the stop signal meet."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import NamedTuple

from service.models.repository import Repository
from service.process.certificates import CertificateFiles
from service.process.config import ServerConfig
from service.process.heap import HeapTrimmer
from service.process.stop import Stop
from service.process.tokens import TokenFile
from service.status_http.conversation import Limits
from service.status_http.pages import Access as PageAccess
from service.status_http.pages import routes
from service.status_http.server import HttpServer
from service.telemetry.metrics import Metrics
from service.transport.credentials import Access
from service.transport.server import Transport, TransportOptions

_log = logging.getLogger(__name__)
Started = Callable[[int, int], None]  # the gRPC port, the HTTP port


class Ending(NamedTuple):
    """How the server ended."""

    answered: bool  # every request that was accepted
    freed: bool  # every thread: none is still loading or running a model


def run(config: ServerConfig, stop: Stop, started: Started = lambda grpc_port, http_port: None) -> Ending:
    """Serve until ``stop`` is set, then drain. Answers (live, not ready) while the models load in the background.

    Raises ConfigError for a port in use.
    """
    metrics = Metrics()
    repository = Repository(config.repository, metrics, device=config.device, threads=config.threads)
    repository.scan()
    certificates, tokens = _credentials(config)
    transport = Transport(
        repository,
        metrics.refused,
        _transport_options(config),
        Access(tokens, frozenset(config.token_free)),
        certificates,
    )
    http = HttpServer(
        config.host,
        config.http_port,
        routes(repository, metrics),
        limits=_http_limits(config),
        access=PageAccess(tokens, client_certificate=config.tls_client_ca is not None),
        certificates=certificates,
        refused=metrics.refused,
    )
    try:
        grpc_port = transport.start()
    except BaseException:
        http.close()
        raise
    http.start()
    _announce(config, repository, grpc_port, http.port)
    started(grpc_port, http.port)
    repository.start()
    heap = HeapTrimmer()
    heap.start()
    stop.wait()
    heap.stop()
    return _drain(config, repository, transport, http)


def _drain(config: ServerConfig, repository: Repository, transport: Transport, http: HttpServer) -> Ending:
    """Not ready, then no new work, then what is at work finishes; the HTTP port answers to the last."""
    if config.lame_duck_seconds:
        _log.info("stopping: not ready, and at work for another %g s", config.lame_duck_seconds)
        repository.retire()
        time.sleep(config.lame_duck_seconds)  # a second signal ends the process at once
    begun = time.monotonic()
    _log.info("draining for up to %g s", config.drain_seconds)
    repository.drain()
    answered = transport.stop(config.drain_seconds)
    freed = repository.close(max(1.0, begun + config.drain_seconds - time.monotonic()))
    http.close()
    if not answered:
        _log.warning("requests were cut off: they were still at work after %g s", config.drain_seconds)
    _log.info("stopped after %.2f s", time.monotonic() - begun)
    return Ending(answered, freed and answered)


def _announce(config: ServerConfig, repository: Repository, grpc_port: int, http_port: int) -> None:
    _log.info(
        "gRPC on %s port %d; metrics and status page on %s://%s:%d/",
        config.host,
        grpc_port,
        "https" if config.tls_certificate else "http",
        config.host,
        http_port,
    )
    if config.token_file and not config.tls_certificate and config.host not in ("127.0.0.1", "::1", "localhost"):
        _log.warning("tokens pass over the network unencrypted: give tls_certificate and tls_key, or put TLS in front")
    for model in repository.models():
        _log.info("%s: %s", model.label, model.state)


def _credentials(config: ServerConfig) -> tuple[CertificateFiles | None, TokenFile | None]:
    """What both ports prove and ask. Raises ConfigError for files that cannot be used."""
    certificates = None
    if config.tls_certificate is not None and config.tls_key is not None:
        certificates = CertificateFiles(config.tls_certificate, config.tls_key, config.tls_client_ca)
    return certificates, None if config.token_file is None else TokenFile(config.token_file)


def _http_limits(config: ServerConfig) -> Limits:
    return Limits(
        connections=config.http_max_connections,
        request_seconds=config.http_request_seconds,
        idle_seconds=config.http_idle_seconds,
        answer_seconds=config.http_idle_seconds,
        header_bytes=config.http_max_header_bytes,
    )


def _transport_options(config: ServerConfig) -> TransportOptions:
    return TransportOptions(
        host=config.host,
        port=config.grpc_port,
        unix_socket=str(config.grpc_socket or ""),
        compress=config.compress,
        max_connections=config.max_connections,
        max_in_flight=config.max_in_flight,
        max_streams=config.max_streams,
        max_watches=config.max_watches,
        max_message_bytes=config.max_message_bytes,
        max_request_bytes=config.max_request_bytes,
        receive_seconds=config.receive_seconds,
        send_seconds=config.send_seconds,
        stream_idle_seconds=config.stream_idle_seconds,
        keepalive_seconds=config.keepalive_seconds,
        max_connection_idle_seconds=config.max_connection_idle_seconds,
        max_connection_age_seconds=config.max_connection_age_seconds,
        overload=config.overload_status,
    )
