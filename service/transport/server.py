"""The gRPC server: built from a registry, bound to one port, drained on stop."""

from __future__ import annotations

import errno
import socket
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import grpc
from grpc_health.v1 import health_pb2_grpc

from bf16kit.errors import ConfigError
from service.contract import Registry, RequestObserver
from service.transport.admission import Admission
from service.transport.handlers import inference_handlers
from service.transport.health import HealthServicer
from service.transport.reflection import enable_reflection
from service.transport.servicer import InferenceServicer
from service.transport.status import StatusTable

_SPARE_THREADS = 16  # for health, metadata, and for refusing what is over the limits
_MIN_PING_INTERVAL_MS = 10_000  # between a client's keepalive pings; gRPC's own limit of 5 minutes drops Triton clients


@dataclass(frozen=True, slots=True)
class TransportOptions:
    """Where to listen and how much to hold. A call waits in a model's queue or is refused, never in between.

    So there is a thread for every request up to ``max_in_flight``, and for every open stream up to ``max_streams``
    (threads are started as they are needed). Calls beyond them find a few spare threads that refuse them; beyond
    those, gRPC itself does. ``share_port`` lets several worker processes listen on one port (SO_REUSEPORT).
    """

    host: str = "127.0.0.1"
    port: int = 8001  # 0 = any free port
    max_in_flight: int = 256
    max_streams: int = 64
    stream_window: int = 16  # requests of one stream at work at once
    max_message_bytes: int = 64 << 20  # of a request
    overload: str = "RESOURCE_EXHAUSTED"  # the status code of a refusal for want of room, by name
    share_port: bool = False


class Transport:
    """The server side of gRPC. :meth:`start` binds and serves; :meth:`stop` drains and may be called more than once."""

    def __init__(self, registry: Registry, observer: RequestObserver, options: TransportOptions) -> None:
        self._options = options
        threads = options.max_in_flight + options.max_streams + _SPARE_THREADS
        self._threads = ThreadPoolExecutor(threads, "grpc")
        self._stream_threads = ThreadPoolExecutor(options.max_in_flight + options.max_streams, "grpc-stream")
        self._health = HealthServicer(registry)
        self._server = grpc.server(self._threads, options=_channel_arguments(options), maximum_concurrent_rpcs=threads)
        statuses = StatusTable(grpc.StatusCode[options.overload])
        self._servicer = servicer = InferenceServicer(
            registry,
            observer,
            statuses,
            requests=Admission(options.max_in_flight, "requests in flight"),
            streams=Admission(options.max_streams, "open streams"),
            stream_threads=self._stream_threads,
            stream_window=options.stream_window,
        )
        self._server.add_generic_rpc_handlers((inference_handlers(servicer, statuses),))
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        enable_reflection(self._server)

    def start(self) -> int:
        """Listen and serve; returns the port. Raises :class:`ConfigError` when the address cannot be bound."""
        host, port = self._options.host, self._options.port
        try:
            bound = self._server.add_insecure_port(_address(host, port))
        except RuntimeError:  # gRPC's own text names neither the cause nor the remedy
            raise ConfigError(_why_not_bound(host, port)) from None
        self._server.start()
        return bound

    def stop(self, grace: float) -> None:
        """Tell NOT_SERVING, refuse new calls, let those at work finish for ``grace`` seconds, then cancel them.

        Watches and idle streams are ended at once, so that only work is waited for.
        """
        self._health.shut_down()
        self._servicer.drain()
        self._server.stop(grace).wait()
        self._threads.shutdown(wait=True)
        self._stream_threads.shutdown(wait=True)


def _channel_arguments(options: TransportOptions) -> list[tuple[str, int]]:
    return [
        # gRPC's default is on: a second server on the same port would silently take half of the calls
        ("grpc.so_reuseport", int(options.share_port)),
        ("grpc.max_receive_message_length", options.max_message_bytes),
        ("grpc.max_send_message_length", -1),  # outputs are as large as the model makes them
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.min_ping_interval_without_data_ms", _MIN_PING_INTERVAL_MS),
    ]


def _address(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _why_not_bound(host: str, port: int) -> str:
    """Why ``host:port`` cannot be listened on, found by trying it once more with a plain socket."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        try:
            probe.bind((host, port))
            probe.listen()
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                return f"port {port} on {host} is in use by another program; stop it, or choose another --grpc-port"
            return f"cannot listen on {_address(host, port)}: {error.strerror or error}; check --host and --grpc-port"
    return f"cannot listen on {_address(host, port)}; check --host and --grpc-port"
