"""The gRPC server: built from a registry, bound to one port, drained on stop."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import grpc

from bf16kit.messages.errors import ConfigError
from bf16kit.service.config import ports
from bf16kit.service.config.certificates import CertificateFiles, Certificates
from bf16kit.service.config.loops import PeriodicThread
from bf16kit.service.config.tokens import TokenFile
from bf16kit.service.contract import Registry
from bf16kit.service.grpc import arrival
from bf16kit.service.grpc.admission import ByteBudget, RequiredScope, RpcPool
from bf16kit.service.grpc.control import ControlServicer
from bf16kit.service.grpc.handlers import SERVICE, HandlerInterceptor, open_by_path
from bf16kit.service.grpc.health import HealthServicer
from bf16kit.service.grpc.inference import InferenceServicer
from bf16kit.service.grpc.timeouts import SECONDS_UNDER_PRESSURE, TICK_SECONDS, CallTimeouts
from bf16kit.service.operations import Operations
from bf16kit.service.request import Tracer
from bf16kit.service.wire.codec import SharedMemory

_log = logging.getLogger(__name__)
_REFLECTION_STREAMS = 16  # each stays open as long as its client goes on asking
_DECODERS = 8  # threads that decode large requests and queue them
_CHANGES = 32  # concurrent calls that wait for a load or unload
_WATCH_THREADS = 128  # a watch needs one only to begin
_SLOW_WATCHER_SECONDS = 1.0  # to read a few bytes; only few watchers may take longer, for each occupies a thread
_FINAL_WAIT_SECONDS = 1.0  # wait of a stopping server for watchers to be notified, and for calls to end
_PING_SECONDS = 20.0  # at most, for the response to the server's ping


@dataclass(frozen=True, slots=True)
class TransportOptions:
    """The address, limits and timeouts. A call beyond a limit is rejected, unless the limit's comment says otherwise.

    Those without a key in ``server.yaml`` are constants of a server. ``share_port``: SO_REUSEPORT, for workers.
    """

    host: str = "127.0.0.1"
    port: int = 8001  # 0 = any free port
    max_in_flight: int = 256
    max_streams: int = 64
    max_watches: int = 1024
    max_connections: int = 4096  # idle ones cost some 20 KB each
    stream_window: int = 16  # requests of one stream in flight: half a batch of the default size
    max_message_bytes: int = 64 << 20  # of a request
    max_request_bytes: int = 512 << 20  # of all requests and responses together
    receive_seconds: float = 10.0  # for a request to arrive, once its headers have
    send_seconds: float = 30.0  # for a client to read a response
    stream_idle_seconds: float = 600.0  # for the next request of a stream without requests in flight
    keepalive_seconds: float = 60.0  # silence after which the client is pinged
    max_connection_idle_seconds: float = 1800.0
    max_connection_age_seconds: float = 0.0  # 0 = no limit
    max_control_calls: int = 128  # concurrent calls for health, metadata and statistics
    # Calls of one connection at a time; or a quarter of the places, if that is more. The others wait in the client,
    # where they cost the server nothing (docs/decisions/0002).
    max_connection_calls: int = 64
    # Calls of one RPC that gRPC's one thread has not reached. Of more than these gRPC ends some at random, of whichever
    # client, and all beyond twice the number; many connections with all their calls open stay below.
    max_undelivered_calls: int = 2048
    handshake_seconds: float = 10.0  # a connection that is not HTTP/2 by then is closed
    min_ping_seconds: float = 10.0  # between a client's pings; gRPC's own limit of 5 minutes drops Triton clients
    # When the server stops, gRPC's thread has delivered the calls that had arrived if it has none to reject for
    # ``quiet_seconds``; at most ``max_delivery_seconds``, for new ones may arrive all the time.
    quiet_seconds: float = 0.2
    max_delivery_seconds: float = 1.0
    share_port: bool = False


class Transport:
    """The gRPC server. :meth:`start` binds and serves. :meth:`stop` drains and may be called more than once.

    ``count_refusal`` is called with one of :data:`~bf16kit.service.request.REFUSALS` for each rejection other than a
    model's own. ``tokens``: None, and everybody may call everything.
    """

    def __init__(
        self,
        registry: Registry,
        count_refusal: Callable[[str], None],
        options: TransportOptions,
        tokens: TokenFile | None = None,
        certificates: CertificateFiles | None = None,
        operations: Operations = Operations(),  # noqa: B008 -- frozen: nothing but inference and looking
        tracer: Tracer | None = None,
    ) -> None:
        self._options = options
        self._certificates = certificates
        self._health = HealthServicer(registry, SERVICE)
        arrival.check_supported()
        self.pools = _pools(options, count_refusal)
        self._inferring = self.pools["inference"], self.pools["streams"]
        # A reader for each stream, and a thread that gRPC asks for.
        self._others = [ThreadPoolExecutor(options.max_streams, "grpc-stream"), ThreadPoolExecutor(1, "grpc")]
        self.inference = InferenceServicer(
            registry,
            count_refusal,
            options.max_in_flight,
            stream_threads=self._others[0],
            stream_window=options.stream_window,
            memory=SharedMemory(operations.regions, options.max_message_bytes),
            tracer=tracer,
        )
        self.control = ControlServicer(registry, operations, RequiredScope(tokens, "manage"))
        handlers = HandlerInterceptor(
            open_by_path(self.pools, self.inference, self.control, self._health, tokens, options.max_message_bytes)
        )
        self._watchdog = PeriodicThread("grpc-watchdog", TICK_SECONDS, self._end_expired)
        # Each pool bounds its own calls: with a common bound, one class could shut out another.
        self._server = grpc.server(self._others[1], options=_channel_arguments(options), interceptors=[handlers])
        handlers.register(self._server)

    def start(self) -> int:
        """Listen and serve. Return the port. Raises :class:`ConfigError` if the address cannot be bound."""
        host, port = self._options.host, self._options.port
        try:
            if self._certificates is None:
                bound = self._server.add_insecure_port(_address(host, port))
            else:
                bound = self._server.add_secure_port(_address(host, port), _credentials(self._certificates))
        except RuntimeError:  # gRPC's own text names neither the cause nor the remedy
            raise _bind_error(host, port) from None
        self._server.start()
        self._watchdog.start()
        return bound

    def stop(self, grace: float) -> bool:
        """Report NOT_SERVING, reject new calls, let those in flight finish for ``grace`` seconds, then cancel them.

        Watches and idle streams end at once, and calls whose clients neither send nor read within seconds, so that the
        server waits for work only. Returns False if a call was still in flight after ``grace`` seconds.
        """
        until = time.monotonic() + grace
        for pool in self._inferring:
            pool.drain(grace)
        self._health.shut_down(min(grace, _FINAL_WAIT_SECONDS))
        self.inference.drain()
        self.control.drain()
        self.pools["changes"].shares.wait_empty(min(until, time.monotonic() + _FINAL_WAIT_SECONDS))
        if not self._wait_empty(0.0):
            self._wait_for_delivery(until)
        # gRPC cancels only after the check below. It starts a thread for that, as does the end: both go on without one.
        with contextlib.suppress(RuntimeError):
            self._server.stop(max(0.0, until - time.monotonic()) + _FINAL_WAIT_SECONDS)
        completed = self._wait_empty(until)
        self._watchdog.stop()
        # All of this gets a moment only. A run that was cut off may never end. Nor may gRPC: it has been seen to wait
        # for ever, holding its lock, after the process could start no more threads.
        closing = threading.Thread(target=self._close, name="grpc-closing", daemon=True)
        with contextlib.suppress(RuntimeError):
            closing.start()
            closing.join(2 * _FINAL_WAIT_SECONDS)
        return completed

    def _wait_empty(self, until: float) -> bool:
        """Wait until no inference is inside. Return False if one still is at ``until``."""
        return all(pool.shares.wait_empty(until) for pool in self._inferring)

    def _wait_for_delivery(self, until: float) -> None:
        """Wait until gRPC's one thread has delivered the calls that have arrived: a stop cancels undelivered ones.

        Delivered calls are rejected, for the pools drain. A client may safely repeat a rejected call, but does not know
        the outcome of a cancelled one.
        """
        started, quiet = time.monotonic(), self._options.quiet_seconds
        until = min(until, started + self._options.max_delivery_seconds)
        while time.monotonic() < min(until, max(started, *(pool.last_drained for pool in self._inferring)) + quiet):
            time.sleep(0.01)

    def _end_expired(self) -> None:
        for pool in self.pools.values():
            pool.receive_timeouts.end_expired()
            pool.send_timeouts.end_expired()

    def _close(self) -> None:
        self._server.stop(0)
        self._wait_empty(time.monotonic() + _FINAL_WAIT_SECONDS)
        for pool in (*self.pools.values(), *self._others):
            pool.shutdown(cancel_futures=True)


def _pools(options: TransportOptions, count_refusal: Callable[[str], None]) -> dict[str, RpcPool]:
    """Return the pool of each class of RPCs."""
    receive, send = options.receive_seconds, options.send_seconds
    budget = ByteBudget(options.max_request_bytes)
    max_slow = max(1, options.max_request_bytes // options.max_message_bytes)

    def pool(name: str, limit: int, what: str, reason: str, **more: Any) -> RpcPool:
        return RpcPool(f"grpc-{name}", limit, what, reason, count_refusal, receive, send, max_slow, **more)

    pools = {
        "inference": pool(
            "infer", options.max_in_flight, "requests in flight", "in_flight", budget=budget, threads=_DECODERS
        ),
        "streams": pool("open-stream", options.max_streams, "open streams", "streams", budget=budget),
        "control": pool("control", options.max_control_calls, "calls for health and metadata", "control"),
        "changes": pool("change", _CHANGES, "loads and unloads of models", "control"),
        "watches": pool("watch", options.max_watches, "health watches", "watches", threads=_WATCH_THREADS),
        "reflection": pool("reflection", _REFLECTION_STREAMS, "reflection streams", "reflection"),
    }
    idle = options.stream_idle_seconds  # also while many are open: streams are idle by nature
    pools["streams"].receive_timeouts = CallTimeouts(idle, idle)
    pools["watches"].send_timeouts = CallTimeouts(SECONDS_UNDER_PRESSURE, _SLOW_WATCHER_SECONDS, max_slow=max_slow)
    return pools


def _channel_arguments(options: TransportOptions) -> list[tuple[str, int]]:
    timeout_ms = _ms(min(options.keepalive_seconds, _PING_SECONDS))
    arguments = {
        # gRPC's default is on: a second server on the same port would silently receive half of the calls
        "grpc.so_reuseport": int(options.share_port),
        "grpc.max_receive_message_length": options.max_message_bytes,
        "grpc.per_message_decompression": 0,  # see bf16kit.service.wire.limits
        "grpc.max_send_message_length": -1,  # outputs are as large as the model makes them
        "grpc.max_concurrent_streams": max(options.max_connection_calls, options.max_in_flight // 4),
        # Off: it counts ended calls that Python has yet to release, so it refuses calls of clients within the limit.
        "grpc.http.overload_protection": 0,
        "grpc.max_allowed_incoming_connections": options.max_connections,
        "grpc.server.max_pending_requests": options.max_undelivered_calls,
        "grpc.server.max_pending_requests_hard_limit": 2 * options.max_undelivered_calls,
        "grpc.server_handshake_timeout_ms": _ms(options.handshake_seconds),
        "grpc.keepalive_time_ms": _ms(options.keepalive_seconds),
        "grpc.keepalive_timeout_ms": timeout_ms,  # for bytes that TCP has sent
        # For the response to a ping: a minute by default, whatever the timeout above.
        "grpc.http2.ping_timeout_ms": timeout_ms,
        "grpc.keepalive_permit_without_calls": 1,
        "grpc.http2.min_ping_interval_without_data_ms": _ms(options.min_ping_seconds),
        "grpc.max_connection_idle_ms": _ms(options.max_connection_idle_seconds),
    }
    if options.max_connection_age_seconds:
        arguments["grpc.max_connection_age_ms"] = _ms(options.max_connection_age_seconds)
    return list(arguments.items())


def _credentials(files: CertificateFiles) -> grpc.ServerCredentials:
    """Return credentials for TLS 1.2 or later. Each new connection gets the files' current certificate."""
    latest = files.current()

    def changed() -> grpc.ServerCertificateConfiguration | None:
        nonlocal latest
        current = files.current()
        if current is latest:
            return None
        latest = current
        return _certificate(current)

    # The stubs omit that None means "unchanged".
    return grpc.dynamic_ssl_server_credentials(_certificate(latest), changed, files.mutual_tls)  # type: ignore[arg-type]


def _certificate(certificates: Certificates) -> grpc.ServerCertificateConfiguration:
    pair = (certificates.key, certificates.certificate)
    return grpc.ssl_server_certificate_configuration([pair], certificates.client_ca)


def _ms(seconds: float) -> int:
    return round(seconds * 1e3)


def _address(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _bind_error(host: str, port: int) -> ConfigError:
    """Find why ``host:port`` cannot be listened on, by another attempt with a plain socket."""
    try:
        ports.listen(host, port, "--grpc-port").close()
    except ConfigError as error:
        return error
    return ConfigError(f"cannot listen on {host} port {port}; check --host and --grpc-port")
