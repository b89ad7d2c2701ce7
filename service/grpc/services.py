"""The servicers and their limits, shared by the gRPC server and :mod:`service.grpc.direct`."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import grpc

from bf16kit.messages.errors import Unavailable
from service.contract import Registry
from service.grpc.admission import Admission, ByteBudget, FairShares
from service.grpc.control import ControlServicer
from service.grpc.credentials import Access, RequiredScope
from service.grpc.handlers import SERVICE, Lanes, Opener, RpcTable
from service.grpc.health import HealthServicer
from service.grpc.options import TransportOptions
from service.grpc.scheduler import StreamScheduler
from service.grpc.servicer import InferenceServicer
from service.grpc.status import StatusTable
from service.operations import Operations
from service.request import Tracer
from service.wire.memory import SharedMemory

CONTROL_CALLS = 128  # concurrent calls for health, metadata and statistics
_CHANGES = 32  # concurrent calls that wait for a load or unload
_REFLECTION_STREAMS = 16
REFLECTION_SECONDS = 10.0  # between two requests of one stream
_SPARE_THREADS = 4  # to reject calls whose client is only known on a thread
FINAL_WAIT_SECONDS = 1.0  # wait of a stopping server for watchers to be notified, and for calls to end
H = TypeVar("H")


class Services:
    """One server's servicers, with an admission for each kind of calls. ``count_refusal`` is as in ``Transport``."""

    def __init__(
        self,
        registry: Registry,
        count_refusal: Callable[[str], None],
        options: TransportOptions,
        access: Access,
        operations: Operations,
        tracer: Tracer | None,
    ) -> None:
        self.statuses = StatusTable(grpc.StatusCode[options.overload])
        self.health = HealthServicer(registry, SERVICE)
        self._pools: list[ThreadPoolExecutor] = []
        self._access = access
        self._max_message_bytes = options.max_message_bytes
        budget = ByteBudget(options.max_request_bytes)
        self.inference = Admission(options.max_in_flight, "requests in flight", budget=budget)
        self.streams = Admission(options.max_streams, "open streams", reason="streams", budget=budget)
        self.control = Admission(CONTROL_CALLS, "calls for health and metadata", reason="control")
        self.changes = Admission(_CHANGES, "loads and unloads of models", reason="control")
        self.watches = Admission(options.max_watches, "health watches", reason="watches")
        self.reflection = Admission(_REFLECTION_STREAMS, "reflection streams", reason="reflection")
        self._servicer = InferenceServicer(
            registry,
            count_refusal,
            self.statuses,
            FairShares(options.max_in_flight, "model", "model_share"),
            stream_readers=self.pool("grpc-stream-reader", options.max_streams + _SPARE_THREADS),
            stream_workers=self.pool("grpc-stream", options.max_in_flight),
            scheduler=StreamScheduler(options.max_in_flight),
            stream_window=options.stream_window,
            memory=SharedMemory(operations.regions, options.max_message_bytes),
            tracer=tracer,
        )
        self._control = ControlServicer(registry, operations, RequiredScope(access.tokens, "manage"))

    def openers(self, lanes: Lanes[H]) -> dict[str, Opener[H]]:
        """Return the function that opens a call of each RPC in its lane; see :meth:`RpcTable.openers`."""
        table = RpcTable(lanes, self._access, self.statuses, self._max_message_bytes)
        return table.openers(self._servicer, self._control, self.health)

    def pool(self, name: str, threads: int) -> ThreadPoolExecutor:
        """Create a thread pool that ends with these services."""
        return self.close_with_services(ThreadPoolExecutor(threads, name))

    def close_with_services(self, pool: ThreadPoolExecutor) -> ThreadPoolExecutor:
        """Return ``pool``, and end it with these services."""
        self._pools.append(pool)
        return pool

    def threads_for(self, admission: Admission) -> int:
        """Return how many threads a lane of ``admission`` needs for all calls that it admits."""
        return admission.limit + _SPARE_THREADS

    def drain(self, until: float) -> None:
        """Reject new work, report NOT_SERVING to watchers, and end streams and waits that would outlast any timeout."""
        for admission in (self.inference, self.streams):
            admission.close(lambda: Unavailable("the server is shutting down; try another", "draining"))
        self.health.shut_down(min(max(0.0, until - time.monotonic()), FINAL_WAIT_SECONDS))
        self._servicer.drain()
        self._control.drain()
        self.changes.wait_empty(min(until, time.monotonic() + FINAL_WAIT_SECONDS))

    def wait_empty(self, until: float) -> bool:
        """Wait until no call is inside. Return False if one still is at ``until`` (:func:`time.monotonic` seconds)."""
        return self.inference.wait_empty(until) and self.streams.wait_empty(until)

    def close(self) -> None:
        """End the threads, and wait a moment for them: a run that was cut off may never end."""
        closing = threading.Thread(target=self._close_pools, name="grpc-closing", daemon=True)
        closing.start()
        closing.join(FINAL_WAIT_SECONDS)

    def _close_pools(self) -> None:
        for pool in self._pools:
            pool.shutdown(cancel_futures=True)
