"""The part of the process that leads a server that knows nothing of gRPC: the HTTP port, and clients' shared memory."""

from __future__ import annotations

import logging

from service.config.credentials import Credentials
from service.config.serverconfig import LOOPBACK, ServerConfig
from service.http.connection import Limits
from service.http.pages import Access, Routes
from service.http.server import HttpServer
from service.regions.files import check_system
from service.regions.table import RegionLimits, RegionTable
from service.telemetry.metrics import Metrics

_log = logging.getLogger(__name__)


def open_http(config: ServerConfig, pages: Routes, metrics: Metrics, credentials: Credentials) -> HttpServer:
    """Return the HTTP server, bound but not serving yet. Raises ConfigError for a port in use."""
    return HttpServer(
        config.host,
        config.http_port,
        pages,
        limits=http_limits(config),
        access=Access(credentials.tokens, config.tls_client_ca is not None, config.host),
        certificates=credentials.certificates,
        on_refused=metrics.refused,
    )


def http_limits(config: ServerConfig) -> Limits:
    """Return the part of the configuration that limits the HTTP port."""
    return Limits(
        connections=config.http_max_connections,
        request_seconds=config.http_request_seconds,
        idle_seconds=config.http_idle_seconds,
        response_seconds=config.http_idle_seconds,
        header_bytes=config.http_max_header_bytes,
    )


def announce(config: ServerConfig, grpc_port: int, http_port: int) -> None:
    """Log the addresses of the server, with a warning if it takes tokens without TLS from other machines."""
    _log.info(
        "gRPC on %s port %d; metrics and status page on %s://%s:%d/",
        config.host,
        grpc_port,
        "https" if config.tls_certificate else "http",
        config.host,
        http_port,
    )
    if config.token_file and not config.tls_certificate and config.host not in LOOPBACK:
        _log.warning("tokens pass over the network unencrypted: give tls_certificate and tls_key, or put TLS in front")


def open_regions(config: ServerConfig) -> RegionTable | None:
    """Return the table of regions, or None if shared memory is off.

    Raises ConfigError if the system does not allow shared memory.
    """
    if not config.shared_memory:
        return None
    check_system()
    prefix = config.shared_memory_prefix
    _log.info("shared memory is on: clients may register files of /dev/shm whose names begin with %r", prefix)
    if not prefix:
        _log.warning(
            "shared_memory_prefix is empty: clients may register every file there that this user may read and write"
        )
    return new_table(config)


def new_table(config: ServerConfig) -> RegionTable:
    """Return a table with the configured limits: for another process of a server that has shared memory on."""
    limits = (config.shared_memory_prefix, config.shared_memory_max_regions, config.shared_memory_max_bytes)
    return RegionTable(RegionLimits(*limits))
