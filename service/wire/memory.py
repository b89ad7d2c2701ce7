"""Inputs and outputs of requests that lie in shared memory, and what one request may have there."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from bf16kit.errors import InvalidRequest, Unsupported
from service.operations import Regions, RegionSlice
from service.wire.parameters import RegionPlace

Hold = Callable[[int], None]  # is told bytes that are about to be taken, and may raise


@dataclass(frozen=True, slots=True)
class SharedMemory:
    """``regions`` is None where it is off. ``max_bytes`` bounds what one request's inputs have there together."""

    regions: Regions | None = None
    max_bytes: int = 64 << 20

    def lease(self, what: str, place: RegionPlace) -> RegionSlice:
        """Where ``what`` (an input or output, for messages) lies. Raises InvalidRequest or NotFound."""
        if self.regions is None:
            raise Unsupported(f"{what} lies in shared memory, which is off; send it in the request")
        return self.regions.lease(*place)

    def read(self, what: str, place: RegionPlace, hold: Hold | None) -> bytes:
        """A copy of it; ``hold`` is told its size before it is made."""
        lease = self.lease(what, place)
        if hold is not None:
            hold(place.byte_size)
        return lease.read()

    def check_size(self, nbytes: int) -> None:
        """Of the inputs of one request so far."""
        if nbytes > self.max_bytes:
            raise InvalidRequest(
                f"the inputs have {nbytes} bytes or more in shared memory, expected at most {self.max_bytes}"
                " (max_message_bytes, the largest request)"
            )
