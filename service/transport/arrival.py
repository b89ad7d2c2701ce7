"""A call whose headers have arrived, before it has a thread: whose it is, and its request as soon as that is there.

grpcio's synchronous server gives a call a thread, which then waits for the request. What it hands to the executor for
that is enough to turn the two round: the thread is then taken once, when there is something to do (35 µs of a small
model's 520 µs), and a client that sends nothing keeps none. That is no promise of grpcio's. So :func:`find_arrival`
looks closely, and gives None where anything is not as it was in the versions below: grpcio's own way is then taken, and
the client is known once the call has its thread.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import grpc

try:
    from grpc import _server
    from grpc._cython import cygrpc  # type: ignore[attr-defined]

    _EVENT: Any = cygrpc.RequestCallEvent
    _STATE: Any = _server._RPCState
    _TOKEN: str = _server._RECEIVE_MESSAGE_TOKEN
    _receive_message: Any = _server._receive_message
    _OPERATION: Any = cygrpc.ReceiveMessageOperation
except (ImportError, AttributeError):  # pragma: no cover -- another grpcio
    _EVENT = _STATE = None

_VERSIONS = range(80, 86)  # grpcio 1.x: the tests have passed with the first and the last
_KNOWN = _STATE is not None and int(grpc.__version__.split(".")[1]) in _VERSIONS


class Arrival:
    """What is known of one call, and may be done with it, on gRPC's own thread."""

    __slots__ = ("_event", "_state")

    def __init__(self, event: Any, state: Any) -> None:
        self._event = event
        self._state = state

    @property
    def client(self) -> str:
        """Its address and port: one connection."""
        peer = self._event.call.peer()
        return peer.decode() if isinstance(peer, bytes) else str(peer)

    def cancel(self) -> None:
        self._event.call.cancel()

    def when_ended(self, ended: Callable[[], None]) -> None:
        """``ended`` is called, on gRPC's own thread, once gRPC has nothing left to do for the call. Call this from
        where the call was found."""
        self._state.callbacks.append(ended)

    def read(self, on_message: Callable[[bytes], bytes], when_done: Callable[[], None]) -> None:
        """Ask for the request. ``on_message`` is given it, and is not called where the client sends none.

        ``when_done`` comes after that in either case, unless the call has ended. Both are called on gRPC's own thread,
        which must not be kept waiting.
        """
        receive = _receive_message(self._state, self._event.call, on_message)

        def on_event(event: Any) -> Any:
            ended, callbacks = receive(event)
            self._state.request = None  # the one who asked has it
            if ended is None:
                when_done()
            return ended, callbacks

        self._event.call.start_server_batch((_OPERATION(0),), on_event)
        self._state.due.add(_TOKEN)


def find_arrival(arguments: tuple[Any, ...]) -> tuple[Any, Arrival] | None:
    """The behavior among the arguments with which grpcio submits a call to an executor, and the call's arrival."""
    if not _KNOWN or len(arguments) != 7:
        return None
    _, event, state, behavior, *_ = arguments
    if type(event) is not _EVENT or type(state) is not _STATE:
        return None
    return behavior, Arrival(event, state)
