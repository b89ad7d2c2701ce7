"""The interface of a call to an RPC, whether it comes from a gRPC server or from another source of its bytes."""

from __future__ import annotations

from typing import Protocol

from service.grpc.claims import ClaimedModel
from service.grpc.credentials import Metadata
from service.request import Cancellation


class CallContext(Protocol):
    """One call, as an RPC sees it.

    ``started`` and ``deadline`` are :func:`time.monotonic` seconds; ``nbytes`` is the size of its only request.
    """

    started: float
    cancellation: Cancellation
    claimed: ClaimedModel | None
    nbytes: int

    @property
    def deadline(self) -> float | None: ...
    @property
    def streams(self) -> bool:
        """Whether it has several requests."""
        ...

    @property
    def client(self) -> str:
        """The client, among those that share the server's places."""
        ...

    @property
    def metadata(self) -> Metadata: ...

    def metadata_value(self, key: str) -> str | bytes | None: ...

    def reserve_more(self, nbytes: int) -> None:
        """Count ``nbytes`` of a response or of shared memory until the call ends. Raises Overloaded if there is no
        room."""
        ...
