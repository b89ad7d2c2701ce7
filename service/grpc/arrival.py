"""Access to a call whose headers have arrived, before it has a thread: its client, and its request once that is there.

grpcio's synchronous server first gives a call a thread, which then waits for the request. The arguments that it submits
to the executor suffice to reverse that order. A thread is then taken when there is work for one, and a client that
sends nothing occupies none.

grpcio does not guarantee this, so the server starts with the versions below only (:func:`check_supported`).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any

import grpc

from bf16kit.messages.errors import ConfigError

try:
    from grpc import _server
    from grpc._cython import cygrpc  # type: ignore[attr-defined]

    _STATE: Any = _server._RPCState
    _TOKEN: str = _server._RECEIVE_MESSAGE_TOKEN
    _receive_message: Any = _server._receive_message
    _send_status: Any = _server._status
    _OPERATION: Any = cygrpc.ReceiveMessageOperation
except (ImportError, AttributeError):  # pragma: no cover -- another grpcio
    _STATE = None

_log = logging.getLogger(__name__)
# Of grpcio 1.x; see pyproject.toml. 1.80 and 1.81 do not apply the limit of undelivered calls
# (bf16kit.service.grpc.transport).
VERSIONS = range(82, 86)
_MAJOR, _MINOR = (int(part) for part in grpc.__version__.split(".")[:2])
SUPPORTED = _STATE is not None and _MAJOR == 1 and _MINOR in VERSIONS


def check_supported() -> None:
    """Raise :class:`ConfigError` if calls cannot be admitted with this grpcio."""
    if not SUPPORTED:
        raise ConfigError(
            f"grpcio is {grpc.__version__}; this server needs 1.{VERSIONS[0]} to 1.{VERSIONS[-1]}: install one of"
            " these versions (`pip install 'grpcio<1.86'`)"
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

    def time_remaining(self) -> float:
        """Return the seconds until the client's deadline, as gRPC's context of a call does."""
        return max(0.0, float(self._event.call_details.deadline) - time.time())

    def cancel(self) -> None:
        self._event.call.cancel()

    def respond(self, response: bytes) -> None:
        """Send the only response, which ends the call. Does not block."""
        _send_status(self._event, self._state, response)

    def reject(self, code: grpc.StatusCode, details: str) -> None:
        """End the call with an error. Does not block."""
        self._state.code, self._state.details = code, details.encode()
        _send_status(self._event, self._state, None)

    def on_end(self, ended: Callable[[], None]) -> None:
        """Call ``ended``, on gRPC's own thread, once gRPC has nothing left to do for the call."""
        self._state.callbacks.append(ended)

    def read(self, on_message: Callable[[bytes], bytes], when_done: Callable[[], None]) -> None:
        """Receive the request: ``on_message`` gets it, if there is one.

        Then ``when_done`` is called, unless the call has ended. Both run on gRPC's own thread, and must not block it.
        """
        receive = _receive_message(self._state, self._event.call, on_message)

        def on_event(event: Any) -> Any:
            ended, callbacks = receive(event)
            self._state.request = None  # on_message() has it
            if ended is None:
                try:
                    when_done()
                except Exception:  # noqa: BLE001 -- it would end gRPC's own thread, and with it the server
                    _log.exception("a call cannot be answered; cancelling it")
                    self.cancel()
            return ended, callbacks

        self._event.call.start_server_batch((_OPERATION(0),), on_event)
        self._state.due.add(_TOKEN)


def find_arrival(arguments: tuple[Any, ...]) -> tuple[Any, Arrival]:
    """Return the behavior in the arguments with which grpcio submits a call to an executor, and the call's arrival."""
    _, event, state, behavior, *_ = arguments
    return behavior, Arrival(event, state)
