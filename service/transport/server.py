"""The gRPC server: built from a registry, bound to one port, drained on stop."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import grpc

from bf16kit.errors import ConfigError, Unavailable
from service.contract import Registry
from service.operations import Operations
from service.process import ports
from service.process.certificates import CertificateFiles
from service.request import Tracer
from service.transport.admission import ByteBudget, Door, FairShares
from service.transport.control import ControlServicer
from service.transport.credentials import Access, Needs, server_credentials
from service.transport.handlers import SERVICE, Lanes, Table
from service.transport.health import HealthServicer
from service.transport.lane import Lane
from service.transport.limit import AdaptiveLimit
from service.transport.servicer import InferenceServicer
from service.transport.status import StatusTable
from service.transport.turns import Turns
from service.transport.watchdog import Patience, Watchdog
from service.wire.memory import SharedMemory

_CONTROL_CALLS = 128  # health checks, metadata, statistics at once
_CHANGES = 32  # of the models served, that calls wait for
_SLOW_CONTROL_CALLS = 8  # that may take longer than a moment to send what is a few bytes
_REFLECTION_STREAMS = 16
_REFLECTION_SECONDS = 10.0  # between two requests of one stream
# For those that keep a server waiting which has no more than half of its places. Not less: it may be the server that is
# late, with thousands of calls before this one on gRPC's one thread.
_HURRIED_SECONDS = 3.0
_DEAF_SECONDS = 1.0  # for a watcher to be sent a few bytes, while others' news waits for it
_LAST_WORDS_SECONDS = 1.0  # how long a stopping server waits for watchers to have been told, and calls to end
# A thread that sleeps for a moment and wakes in time, again and again, shows that its process is not behind with work.
_NAP_SECONDS, _PUNCTUAL_SECONDS, _PUNCTUAL_NAPS = 0.002, 0.005, 40
_CATCH_UP_SECONDS = 2.0  # at most
_SPARE_THREADS = 4  # to refuse calls on, where it takes a thread to know whose they are
_MIN_PING_INTERVAL_MS = 10_000  # between a client's keepalive pings; gRPC's own limit of 5 minutes drops Triton clients
_PING_SECONDS = 20.0  # at most, for the answer to a ping of ours
_STREAMS_PER_CONNECTION = 4096  # many more than are let in: what is refused is refused here, and not held in clients
_HANDSHAKE_MS = 10_000  # a connection that is not HTTP/2 by then is closed


@dataclass(frozen=True, slots=True)
class TransportOptions:
    """Where to listen, how much to hold, and how long to wait for clients. A call has its place or is refused.

    ``share_port`` lets several worker processes listen on one port (SO_REUSEPORT).
    """

    host: str = "127.0.0.1"
    port: int = 8001  # 0 = any free port
    unix_socket: str = ""  # a path to listen on as well, without TLS: the file's directory says who may connect
    max_in_flight: int = 256
    max_streams: int = 64
    max_watches: int = 1024
    max_connections: int = 4096
    compress: bool = False  # responses, with gzip, for clients that take it
    stream_window: int = 16  # requests of one stream at work at once
    max_message_bytes: int = 64 << 20  # of a request
    max_request_bytes: int = 512 << 20  # of all requests and answers together
    receive_seconds: float = 10.0  # for a request to arrive, once its headers have
    send_seconds: float = 30.0  # for a client to take a response
    stream_idle_seconds: float = 600.0  # for the next request of a stream that waits for none of its responses
    keepalive_seconds: float = 60.0  # of silence, after which the client is asked whether it is there
    max_connection_idle_seconds: float = 1800.0
    max_connection_age_seconds: float = 0.0  # 0 = no limit
    overload: str = "RESOURCE_EXHAUSTED"  # the status code of a refusal for want of room, by name
    share_port: bool = False


class Transport:
    """The server side of gRPC. :meth:`start` binds and serves; :meth:`stop` drains and may be called more than once.

    ``refused`` is told of each refusal that is not a model's own, by one of :data:`~service.request.REFUSALS`.
    """

    def __init__(
        self,
        registry: Registry,
        refused: Callable[[str], None],
        options: TransportOptions,
        access: Access = Access(),  # noqa: B008 -- frozen: everybody may call everything
        certificates: CertificateFiles | None = None,
        operations: Operations = Operations(),  # noqa: B008 -- frozen: nothing but inference and looking
        tracer: Tracer | None = None,
    ) -> None:
        self._options = options
        self._statuses = StatusTable(grpc.StatusCode[options.overload])
        self._refused = refused
        self._certificates = certificates
        self._patiences: list[Patience] = []
        self._pools: list[ThreadPoolExecutor] = []
        self._health = HealthServicer(registry, SERVICE)
        limit, budget = AdaptiveLimit(options.max_in_flight), ByteBudget(options.max_request_bytes)
        self._inference = Door(options.max_in_flight, "requests in flight", budget=budget, adaptive=limit)
        self._streams = Door(options.max_streams, "open streams", reason="streams", budget=budget)
        self._changes = Door(_CHANGES, "loads and unloads of models", reason="control")
        self._servicer = InferenceServicer(
            registry,
            refused,
            self._statuses,
            FairShares(options.max_in_flight, "model", "model_share"),
            limit,
            stream_readers=self._pool("grpc-stream-reader", options.max_streams + _SPARE_THREADS),
            stream_answerers=self._pool("grpc-stream", options.max_in_flight),
            turns=Turns(options.max_in_flight),
            stream_window=options.stream_window,
            memory=SharedMemory(operations.regions, options.max_message_bytes),
            tracer=tracer,
        )
        self._control = ControlServicer(registry, operations, Needs(access.tokens, "manage"))
        handlers = Table(self._lanes(), access, self._statuses, options.max_message_bytes).handlers(
            self._servicer, self._control, self._health
        )
        self._watchdog = Watchdog(self._patiences)
        # Each lane bounds its own calls: a bound on all of them would let one lane's calls shut out another's.
        self._server = grpc.server(
            self._pool("grpc", 1),
            options=_channel_arguments(options),
            interceptors=[handlers],
        )
        handlers.register(self._server)

    def start(self) -> int:
        """Listen and serve; returns the port. Raises :class:`ConfigError` when the address cannot be bound."""
        host, port = self._options.host, self._options.port
        try:
            if self._certificates is None:
                bound = self._server.add_insecure_port(_address(host, port))
            else:
                credentials = server_credentials(self._certificates)
                bound = self._server.add_secure_port(_address(host, port), credentials)
            if self._options.unix_socket:
                self._server.add_insecure_port(f"unix:{self._options.unix_socket}")
        except RuntimeError:  # gRPC's own text names neither the cause nor the remedy
            raise _why_not_bound(host, port) from None
        self._server.start()
        self._watchdog.start()
        return bound

    def stop(self, grace: float) -> bool:
        """Tell NOT_SERVING, refuse new calls, and let those at work finish for ``grace`` seconds; then cancel them.

        Watches and idle streams are ended at once, and calls whose clients do not send or take anything after half of
        the time: so only work is waited for. False when something was still at work after ``grace`` seconds.
        """
        until = time.monotonic() + grace
        for patience in self._patiences:
            patience.stop(grace)
        for door in (self._inference, self._streams):
            door.close(lambda: Unavailable("the server is shutting down; try another", "draining"))
        self._health.shut_down(min(grace, _LAST_WORDS_SECONDS))
        self._servicer.drain()
        self._control.drain()
        self._changes.wait_empty(min(until, time.monotonic() + _LAST_WORDS_SECONDS))
        if not self._empty(0.0):
            catch_up(until)
        self._server.stop(max(0.0, until - time.monotonic()) + _LAST_WORDS_SECONDS)  # it cancels later than we look
        answered = self._empty(until)
        self._server.stop(0)
        self._watchdog.stop()
        self._empty(time.monotonic() + _LAST_WORDS_SECONDS)
        closing = threading.Thread(target=self._close_pools, name="grpc-closing", daemon=True)
        closing.start()
        closing.join(_LAST_WORDS_SECONDS)  # a run that was cut off may never end
        return answered

    def _close_pools(self) -> None:
        for pool in self._pools:
            pool.shutdown(cancel_futures=True)

    def _empty(self, until: float) -> bool:
        """Whether no call was inside by ``until``."""
        return self._inference.wait_empty(until) and self._streams.wait_empty(until)

    def _lanes(self) -> Lanes:
        options = self._options
        receive, send = options.receive_seconds, options.send_seconds
        slow = max(1, options.max_request_bytes // options.max_message_bytes)
        control = Door(_CONTROL_CALLS, "calls for health and metadata", reason="control")
        watches = Door(options.max_watches, "health watches", reason="watches")
        reflection = Door(_REFLECTION_STREAMS, "reflection streams", reason="reflection")
        return Lanes(
            inference=self._lane("grpc-infer", self._inference, receive, send, slow=slow),
            streams=self._lane("grpc-open-stream", self._streams, options.stream_idle_seconds, send),
            control=self._lane("grpc-control", control, receive, send, slow=_SLOW_CONTROL_CALLS),
            changes=self._lane("grpc-change", self._changes, receive, send, slow=_SLOW_CONTROL_CALLS),
            watches=self._lane(
                "grpc-watch",
                watches,
                receive,
                slow=_SLOW_CONTROL_CALLS,
                threads=_CONTROL_CALLS,
                sending=Patience(_HURRIED_SECONDS, _DEAF_SECONDS, lambda: self._health.held_up),
            ),
            reflection=self._lane("grpc-reflection", reflection, _REFLECTION_SECONDS, _REFLECTION_SECONDS),
        )

    def _lane(
        self,
        name: str,
        door: Door,
        receive_seconds: float,
        send_seconds: float = 0.0,
        *,
        slow: int | None = None,
        threads: int | None = None,
        sending: Patience | None = None,
    ) -> Lane:
        hurried = receive_seconds if door is self._streams else _HURRIED_SECONDS  # streams are idle by nature
        receiving = Patience(receive_seconds, hurried, lambda: door.crowded, slow=slow)
        sending = sending or Patience(send_seconds, _HURRIED_SECONDS, lambda: door.crowded)
        self._patiences += [receiving, sending]
        lane = Lane(
            name,
            door,
            threads or door.limit + _SPARE_THREADS,
            receiving,
            sending,
            self._statuses,
            self._refused,
        )
        self._pools.append(lane.threads)
        return lane

    def _pool(self, name: str, threads: int) -> ThreadPoolExecutor:
        self._pools.append(ThreadPoolExecutor(threads, name))
        return self._pools[-1]


def catch_up(until: float) -> None:
    """Let gRPC's one thread tell of the calls that have come: gRPC cancels those that it did not when it is stopped.

    What is told of is refused by now. A client may send again what was refused, and cannot know what became of a call
    that was cancelled. That thread is late where a hundred others want their turn, and then so is this one.
    """
    until, punctual = min(until, time.monotonic() + _CATCH_UP_SECONDS), 0
    while (begun := time.monotonic()) < until and punctual < _PUNCTUAL_NAPS:
        time.sleep(_NAP_SECONDS)
        punctual = punctual + 1 if time.monotonic() - begun < _PUNCTUAL_SECONDS else 0


def _channel_arguments(options: TransportOptions) -> list[tuple[str, int]]:
    patience = _ms(min(options.keepalive_seconds, _PING_SECONDS))
    arguments = {
        # gRPC's default is on: a second server on the same port would silently take half of the calls
        "grpc.so_reuseport": int(options.share_port),
        "grpc.max_receive_message_length": options.max_message_bytes,
        "grpc.per_message_decompression": 0,  # see service.wire.inflate
        "grpc.max_send_message_length": -1,  # outputs are as large as the model makes them
        "grpc.max_concurrent_streams": _STREAMS_PER_CONNECTION,
        "grpc.max_allowed_incoming_connections": options.max_connections,
        "grpc.server.max_pending_requests": options.max_in_flight,
        "grpc.server.max_pending_requests_hard_limit": 2 * options.max_in_flight,
        "grpc.server_handshake_timeout_ms": _HANDSHAKE_MS,
        "grpc.keepalive_time_ms": _ms(options.keepalive_seconds),
        "grpc.keepalive_timeout_ms": patience,  # for bytes that TCP has sent
        "grpc.http2.ping_timeout_ms": patience,  # for the answer to a ping: a minute by default, whatever stands above
        "grpc.keepalive_permit_without_calls": 1,
        "grpc.http2.min_ping_interval_without_data_ms": _MIN_PING_INTERVAL_MS,
        "grpc.max_connection_idle_ms": _ms(options.max_connection_idle_seconds),
    }
    if options.compress:
        # A level, because an algorithm would be used for clients that do not take it, too. The least one is gzip.
        arguments["grpc.default_compression_level"] = 1
    if options.max_connection_age_seconds:
        arguments["grpc.max_connection_age_ms"] = _ms(options.max_connection_age_seconds)
    return list(arguments.items())


def _ms(seconds: float) -> int:
    return min(round(seconds * 1e3), 2**31 - 1)


def _address(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _why_not_bound(host: str, port: int) -> ConfigError:
    """Why ``host:port`` cannot be listened on, found by trying it once more with a plain socket."""
    try:
        ports.listen(host, port, "--grpc-port").close()
    except ConfigError as error:
        return error
    return ConfigError(f"cannot listen on {host} port {port}; check --host and --grpc-port")
