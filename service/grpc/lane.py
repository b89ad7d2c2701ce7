"""Lanes: calls of each kind are admitted or rejected when their headers arrive, before anything of a request is read.

gRPC asks for a handler on the one thread that all calls share, and submits the call to that handler's executor. There
the call is admitted or rejected. A rejected call is answered at once on that thread. An admitted one runs on the lane's
own threads as soon as its request has arrived, so one kind of calls cannot take the threads of another.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeAlias

import grpc

from bf16kit.messages.errors import Forbidden, Overloaded, RequestError, Unauthenticated, Unavailable
from service.grpc.admission import Admission
from service.grpc.arrival import find_arrival as find_arrival
from service.grpc.call import Call, Rpc, UnaryCall, WatchCall
from service.grpc.credentials import Metadata, RequiredScope
from service.grpc.status import Status, StatusTable
from service.grpc.streamcall import StreamCall
from service.grpc.watchdog import CallTimeouts

_REFUSAL_REASONS: dict[type[Exception], str] = {
    Unauthenticated: "unauthenticated",
    Forbidden: "forbidden",
}
_log = logging.getLogger(__name__)
Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"  # generic for type checkers only


class _Rejection:
    """A behavior that rejects a call with one status, whatever the arity of the RPC."""

    def __init__(self, status: Status) -> None:
        self.experimental_thread_pool = _INLINE
        self._status = status

    def __call__(self, messages: Iterator[bytes], context: grpc.ServicerContext) -> Any:
        context.abort(self._status.code, self._status.details)


def rejection_handler(status: Status) -> Handler:
    """Return a handler that answers ``status`` and reads nothing."""
    return grpc.stream_unary_rpc_method_handler(_Rejection(status))


class _InlineExecutor(ThreadPoolExecutor):
    """An executor that runs its task at once: for rejections, which do not block and are not worth a thread."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        fn(*args, **kwargs)
        return _finished_future()


_INLINE = _InlineExecutor(1)


class _AdmittingExecutor(ThreadPoolExecutor):
    """A lane's threads, for calls that are admitted and have work to do."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Admit and start a call.

        Runs on gRPC's own thread: an exception would end that thread, and with it the server.
        """
        submit = super().submit
        found = find_arrival(args)
        if found is None or not isinstance(found[0], Call):
            try:
                return submit(fn, *args, **kwargs)
            except RuntimeError as error:
                _log.warning("no thread can be started for a call, which is not answered: %s", error)
                return _finished_future()
        call, arrival = found
        try:
            if not call.admit(arrival.client):
                return _INLINE.submit(fn, *args, **kwargs)
            call.start(arrival, lambda: submit(fn, *args, **kwargs), lambda: fn(*args, **kwargs))
        except Exception:  # noqa: BLE001 -- see above
            _log.exception("a call cannot be started; cancelling it")
            call.give_up(arrival)
        return _finished_future()


def _finished_future() -> Future[Any]:
    """Return a finished future. gRPC only uses it to count calls in flight, and only if their number is bounded."""
    done: Future[Any] = Future()
    done.set_result(None)
    return done


class Lane:
    """The entrance for one kind of calls: their places, their threads and their timeouts.

    ``count_refusal`` is called with the reason of every rejection before a call reaches a model.
    """

    def __init__(
        self,
        name: str,
        admission: Admission,
        threads: int,
        receive_timeouts: CallTimeouts,
        send_timeouts: CallTimeouts,
        statuses: StatusTable,
        count_refusal: Callable[[str], None],
    ) -> None:
        self.admission = admission
        self.threads: ThreadPoolExecutor = _AdmittingExecutor(threads, name)
        self.receive_timeouts = receive_timeouts
        self.send_timeouts = send_timeouts
        self.count_refusal = count_refusal
        self._statuses = statuses

    def open(self, rpc: Rpc, required: RequiredScope, metadata: Metadata) -> Handler:
        """Return the handler of a call whose headers have arrived."""
        try:
            required.check(metadata)
        except RequestError as error:
            return rejection_handler(self.status(error))
        # All as streams of requests, of which one is read: otherwise gRPC would read the request before admission.
        if rpc.kind == "stream":
            return grpc.stream_stream_rpc_method_handler(StreamCall(rpc, self), None, rpc.serialize)
        if rpc.kind == "watch":
            watch = WatchCall(rpc, self)
            return grpc.stream_stream_rpc_method_handler(watch, watch.received, rpc.serialize)
        call = UnaryCall(rpc, self)
        return grpc.stream_unary_rpc_method_handler(call, call.received, rpc.serialize)

    def reject(self, error: RequestError, required: RequiredScope, metadata: Metadata) -> Handler:
        """Return the handler of a call that is always rejected.

        A caller without the required token gets that error instead.
        """
        try:
            required.check(metadata)
        except RequestError as forbidden:
            error = forbidden
        return rejection_handler(self.status(error))

    def status(self, error: Exception) -> Status:
        """Return the status for an error that ended a call before it reached a model, and count its reason."""
        reason = refusal_reason(error)
        if reason:
            self.count_refusal(reason)
        return self._statuses.for_error(error)


def refusal_reason(error: Exception) -> str:
    """Return the metrics' reason for a call that ended before it reached a model; "" if they have none."""
    return error.reason if isinstance(error, Overloaded | Unavailable) else _REFUSAL_REASONS.get(type(error), "")
