"""The gRPC server: built from a registry, bound to one port, drained on stop."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

import grpc

from bf16kit.messages.errors import ConfigError
from service.config import ports
from service.config.certificates import CertificateFiles
from service.contract import Registry
from service.grpc import arrival
from service.grpc.admission import Admission
from service.grpc.credentials import Access, server_credentials
from service.grpc.handlers import HandlerInterceptor, Lanes
from service.grpc.lane import Handler, Lane
from service.grpc.options import TransportOptions as TransportOptions
from service.grpc.services import CONTROL_CALLS, FINAL_WAIT_SECONDS, REFLECTION_SECONDS, Services
from service.grpc.watchdog import CallTimeouts, Watchdog
from service.operations import Operations
from service.request import Tracer

_log = logging.getLogger(__name__)
_SLOW_CONTROL_CALLS = 8  # control calls that may be slow to send their few bytes
# Time for slow clients once half of the server's places are taken. Not shorter: the delay may be the server's own, with
# thousands of earlier calls on gRPC's one thread.
_SECONDS_UNDER_PRESSURE = 3.0
_SLOW_WATCHER_SECONDS = 1.0  # for a watcher to read a few bytes while others wait
# A thread that repeatedly sleeps for a moment and wakes in time shows that its process has no backlog.
_NAP_SECONDS, _PUNCTUAL_SECONDS, _PUNCTUAL_NAPS = 0.002, 0.005, 40
_MAX_DELIVERY_SECONDS = 2.0  # at most
_MIN_PING_INTERVAL_MS = 10_000  # between a client's keepalive pings; gRPC's own limit of 5 minutes drops Triton clients
_PING_SECONDS = 20.0  # at most, for the response to the server's ping
# Calls of one connection at a time; or a quarter of the places, if that is more. The others wait in the client, where
# they cost the server nothing (docs/decisions/0025).
_STREAMS_PER_CONNECTION = 64
# Calls of one RPC that gRPC's one thread has not reached. Of more than these gRPC ends some at random, of whichever
# client, and all beyond twice the number; many connections with all their calls open stay below.
_UNDELIVERED_CALLS = 2048
_HANDSHAKE_MS = 10_000  # a connection that is not HTTP/2 by then is closed


class Transport:
    """The gRPC server. :meth:`start` binds and serves. :meth:`stop` drains and may be called more than once.

    ``count_refusal`` is called with one of :data:`~service.request.REFUSALS` for each rejection other than a
    model's own.
    """

    def __init__(
        self,
        registry: Registry,
        count_refusal: Callable[[str], None],
        options: TransportOptions,
        access: Access = Access(),  # noqa: B008 -- frozen: everybody may call everything
        certificates: CertificateFiles | None = None,
        operations: Operations = Operations(),  # noqa: B008 -- frozen: nothing but inference and looking
        tracer: Tracer | None = None,
    ) -> None:
        self._options = options
        self._count_refusal = count_refusal
        self._certificates = certificates
        self._timeouts: list[CallTimeouts] = []
        self._claimed: ports.ClaimedPath | None = None  # the Unix socket
        self._services = Services(registry, count_refusal, options, access, operations, tracer)
        handlers = HandlerInterceptor(self._services.openers(self._lanes()))
        self._watchdog = Watchdog(self._timeouts)
        # Each lane bounds its own calls: with a common bound, one lane's calls could shut out another's.
        self._server = grpc.server(
            self._services.pool("grpc", 1),
            options=_channel_arguments(options),
            interceptors=[handlers],
        )
        handlers.register(self._server)

    def start(self) -> int:
        """Listen and serve. Return the port. Raises :class:`ConfigError` if the address cannot be bound."""
        host, port = self._options.host, self._options.port
        try:
            if self._certificates is None:
                bound = self._server.add_insecure_port(_address(host, port))
            else:
                credentials = server_credentials(self._certificates)
                bound = self._server.add_secure_port(_address(host, port), credentials)
        except RuntimeError:  # gRPC's own text names neither the cause nor the remedy
            raise _bind_error(host, port) from None
        if self._options.unix_socket:
            self._listen_on_socket(self._options.unix_socket)
        self._server.start()
        self._watchdog.start()
        if not arrival.SUPPORTED:
            _log.warning(arrival.WARNING)
        return bound

    def stop(self, grace: float) -> bool:
        """Report NOT_SERVING, reject new calls, let those in flight finish for ``grace`` seconds, then cancel them.

        Watches and idle streams end at once. Calls whose clients neither send nor read end after half of the time, so
        that the server waits for work only. Returns False if a call was still in flight after ``grace`` seconds.
        """
        until = time.monotonic() + grace
        for timeouts in self._timeouts:
            timeouts.shorten(grace)
        self._services.drain(until)
        if not self._services.wait_empty(0.0):
            wait_for_delivery(until)
        # gRPC cancels only after the check below.
        self._server.stop(max(0.0, until - time.monotonic()) + FINAL_WAIT_SECONDS)
        completed = self._services.wait_empty(until)
        self._server.stop(0)
        self._watchdog.stop()
        self._services.wait_empty(time.monotonic() + FINAL_WAIT_SECONDS)
        self._services.close()
        return completed

    def _listen_on_socket(self, path: str) -> None:
        """Raises ConfigError if the path cannot be used. gRPC alone would take it from a server that still runs."""
        self._claimed = ports.ClaimedPath(path)
        try:
            self._server.add_insecure_port(f"unix:{path}")
        except RuntimeError:
            raise ConfigError(f"cannot listen on grpc_socket {path}; choose another path") from None

    def _lanes(self) -> Lanes[Handler]:
        options, services = self._options, self._services
        receive, send = options.receive_seconds, options.send_seconds
        max_slow = max(1, options.max_request_bytes // options.max_message_bytes)
        return Lanes(
            inference=self._lane("grpc-infer", services.inference, receive, send, max_slow=max_slow),
            streams=self._lane("grpc-open-stream", services.streams, options.stream_idle_seconds, send),
            control=self._lane("grpc-control", services.control, receive, send, max_slow=_SLOW_CONTROL_CALLS),
            changes=self._lane("grpc-change", services.changes, receive, send, max_slow=_SLOW_CONTROL_CALLS),
            watches=self._lane(
                "grpc-watch",
                services.watches,
                receive,
                max_slow=_SLOW_CONTROL_CALLS,
                threads=CONTROL_CALLS,
                send_timeouts=CallTimeouts(
                    _SECONDS_UNDER_PRESSURE, _SLOW_WATCHER_SECONDS, lambda: services.health.has_backlog
                ),
            ),
            reflection=self._lane("grpc-reflection", services.reflection, REFLECTION_SECONDS, REFLECTION_SECONDS),
        )

    def _lane(
        self,
        name: str,
        admission: Admission,
        receive_seconds: float,
        send_seconds: float = 0.0,
        *,
        max_slow: int | None = None,
        threads: int | None = None,
        send_timeouts: CallTimeouts | None = None,
    ) -> Lane:
        services = self._services
        idle = admission is services.streams  # streams are idle by nature
        receive_timeouts = CallTimeouts(
            receive_seconds,
            receive_seconds if idle else _SECONDS_UNDER_PRESSURE,
            lambda: admission.under_pressure,
            max_slow=max_slow,
        )
        send_timeouts = send_timeouts or CallTimeouts(
            send_seconds, _SECONDS_UNDER_PRESSURE, lambda: admission.under_pressure
        )
        self._timeouts += [receive_timeouts, send_timeouts]
        count = threads or services.threads_for(admission)
        lane = Lane(name, admission, count, receive_timeouts, send_timeouts, services.statuses, self._count_refusal)
        services.close_with_services(lane.threads)
        return lane


def wait_for_delivery(until: float) -> None:
    """Wait until gRPC's one thread has delivered the calls that have arrived: a stop cancels undelivered ones.

    Delivered calls are rejected by now. A client may safely repeat a rejected call, but does not know the outcome of a
    cancelled one. While a hundred other threads compete for the processor, that thread is late, and so is this one.
    """
    until, punctual = min(until, time.monotonic() + _MAX_DELIVERY_SECONDS), 0
    while (started := time.monotonic()) < until and punctual < _PUNCTUAL_NAPS:
        time.sleep(_NAP_SECONDS)
        punctual = punctual + 1 if time.monotonic() - started < _PUNCTUAL_SECONDS else 0


def _channel_arguments(options: TransportOptions) -> list[tuple[str, int]]:
    timeout_ms = _ms(min(options.keepalive_seconds, _PING_SECONDS))
    arguments = {
        # gRPC's default is on: a second server on the same port would silently receive half of the calls
        "grpc.so_reuseport": int(options.share_port),
        "grpc.max_receive_message_length": options.max_message_bytes,
        "grpc.per_message_decompression": 0,  # see service.wire.inflate
        "grpc.max_send_message_length": -1,  # outputs are as large as the model makes them
        "grpc.max_concurrent_streams": max(_STREAMS_PER_CONNECTION, options.max_in_flight // 4),
        # Off: it counts ended calls that Python has yet to release, so it refuses calls of clients within the limit.
        "grpc.http.overload_protection": 0,
        "grpc.max_allowed_incoming_connections": options.max_connections,
        "grpc.server.max_pending_requests": _UNDELIVERED_CALLS,
        "grpc.server.max_pending_requests_hard_limit": 2 * _UNDELIVERED_CALLS,
        "grpc.server_handshake_timeout_ms": _HANDSHAKE_MS,
        "grpc.keepalive_time_ms": _ms(options.keepalive_seconds),
        "grpc.keepalive_timeout_ms": timeout_ms,  # for bytes that TCP has sent
        # For the response to a ping: a minute by default, whatever the timeout above.
        "grpc.http2.ping_timeout_ms": timeout_ms,
        "grpc.keepalive_permit_without_calls": 1,
        "grpc.http2.min_ping_interval_without_data_ms": _MIN_PING_INTERVAL_MS,
        "grpc.max_connection_idle_ms": _ms(options.max_connection_idle_seconds),
    }
    if options.compress:
        # A level: an algorithm would also be used for clients that do not accept it. The lowest level is gzip.
        arguments["grpc.default_compression_level"] = 1
    if options.max_connection_age_seconds:
        arguments["grpc.max_connection_age_ms"] = _ms(options.max_connection_age_seconds)
    return list(arguments.items())


def _ms(seconds: float) -> int:
    return min(round(seconds * 1e3), 2**31 - 1)


def _address(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _bind_error(host: str, port: int) -> ConfigError:
    """Find why ``host:port`` cannot be listened on, by another attempt with a plain socket."""
    try:
        ports.listen(host, port, "--grpc-port").close()
    except ConfigError as error:
        return error
    return ConfigError(f"cannot listen on {host} port {port}; check --host and --grpc-port")
