"""Build the HTTP port from the configuration: probes, metrics and the status page. It knows nothing of gRPC."""

from __future__ import annotations

import logging

from service.config.certificates import Credentials
from service.config.serverconfig import LOOPBACK, ServerConfig
from service.http.httpserver import HttpServer
from service.http.pages import Access, Routes
from service.telemetry.metrics import Metrics

_log = logging.getLogger(__name__)


def open_http(config: ServerConfig, pages: Routes, metrics: Metrics, credentials: Credentials) -> HttpServer:
    """Return the HTTP server, bound but not serving yet. Raises ConfigError for a port in use."""
    return HttpServer(
        config.host,
        config.http_port,
        pages,
        access=Access(credentials.tokens, config.tls_client_ca is not None, config.host),
        certificates=credentials.certificates,
        on_refused=metrics.refused,
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
