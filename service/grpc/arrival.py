"""Access to a call whose headers have arrived, before it has a thread: its client, and its request once that is there.

grpcio's synchronous server first gives a call a thread, which then waits for the request. The arguments that it submits
to the executor suffice to reverse that order. The thread is then taken once, when there is work (35 µs of a small
model's 520 µs), and a client that sends nothing occupies none.

grpcio does not guarantee this. :func:`find_arrival` therefore checks the arguments, and returns None unless everything
is as in the versions below. Calls then take grpcio's own way, and the client is known once the call has its thread. The
server logs :data:`WARNING` at its start in that case.
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

_VERSIONS = range(80, 86)  # of grpcio 1.x: the tests have passed with the first and the last; see pyproject.toml
_MAJOR, _MINOR = (int(part) for part in grpc.__version__.split(".")[:2])
SUPPORTED = _STATE is not None and _MAJOR == 1 and _MINOR in _VERSIONS
WARNING = (
    f"grpcio is {grpc.__version__}, and calls are admitted before they have a thread only with 1.{_VERSIONS[0]} to"
    f" 1.{_VERSIONS[-1]}: clients that send no request occupy threads of this server; install one of these versions"
)


class Arrival:
    """One call on gRPC's own thread: what is known of it, and what can be done with it."""

    __slots__ = ("_event", "_state")

    def __init__(self, event: Any, state: Any) -> None:
        self._event = event
        self._state = state

    @property
    def client(self) -> str:
        """The client's address and port, which identify one connection."""
        peer = self._event.call.peer()
        return peer.decode() if isinstance(peer, bytes) else str(peer)

    def cancel(self) -> None:
        self._event.call.cancel()

    def on_end(self, ended: Callable[[], None]) -> None:
        """Call ``ended``, on gRPC's own thread, once gRPC has nothing left to do for the call.

        Must be called from where the call was found.
        """
        self._state.callbacks.append(ended)

    def read(self, on_message: Callable[[bytes], bytes], when_done: Callable[[], None]) -> None:
        """Start to receive the request. ``on_message`` gets it, and is not called if the client sends none.

        ``when_done`` is called afterwards in either case, unless the call has ended. Both run on gRPC's own thread,
        which they must not block.
        """
        receive = _receive_message(self._state, self._event.call, on_message)

        def on_event(event: Any) -> Any:
            ended, callbacks = receive(event)
            self._state.request = None  # on_message() has it
            if ended is None:
                when_done()
            return ended, callbacks

        self._event.call.start_server_batch((_OPERATION(0),), on_event)
        self._state.due.add(_TOKEN)


def find_arrival(arguments: tuple[Any, ...]) -> tuple[Any, Arrival] | None:
    """Return the behavior in the arguments with which grpcio submits a call to an executor, and the call's arrival."""
    if not SUPPORTED or len(arguments) != 7:
        return None
    _, event, state, behavior, *_ = arguments
    if type(event) is not _EVENT or type(state) is not _STATE:
        return None
    return behavior, Arrival(event, state)
