"""What an RPC may know of its call, whoever brings it: a gRPC server, or somebody else who has its bytes."""

from __future__ import annotations

from typing import Protocol

from service.request import Cancellation
from service.transport.claims import Claimed
from service.transport.credentials import Metadata


class Calling(Protocol):
    """``started`` and ``deadline`` are :func:`time.monotonic` seconds; ``nbytes`` are those of its one request."""

    started: float
    cancellation: Cancellation
    claimed: Claimed | None
    nbytes: int

    @property
    def deadline(self) -> float | None: ...
    @property
    def streams(self) -> bool:
        """Whether it has many requests."""
        ...

    @property
    def client(self) -> str:
        """Whose call it is, among those that share the server's places."""
        ...

    @property
    def metadata(self) -> Metadata: ...

    def metadatum(self, key: str) -> str | bytes | None: ...

    def hold_more(self, nbytes: int) -> None:
        """Count ``nbytes`` beside the message until the call ends: of its answer, or of what it has in shared memory.
        Raises Overloaded for want of room."""
        ...
