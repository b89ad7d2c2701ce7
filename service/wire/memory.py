"""Inputs and outputs in shared memory, and the limit on the inputs of one request there."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from bf16kit.messages.errors import InvalidRequest, Unsupported
from service.operations import Regions, RegionSlice
from service.wire.parameters import RegionPlace

Reserve = Callable[[int], None]  # called with the bytes that are about to be allocated; may raise


@dataclass(frozen=True, slots=True)
class SharedMemory:
    """Access to shared memory. ``regions`` is None if it is off; ``max_bytes`` limits one request's inputs."""

    regions: Regions | None = None
    max_bytes: int = 64 << 20

    def lease(self, what: str, place: RegionPlace) -> RegionSlice:
        """Return the bytes of ``what`` (an input or output, as messages name it).

        Raises InvalidRequest or NotFound; Unsupported if shared memory is off.
        """
        if self.regions is None:
            raise Unsupported(f"{what} is in shared memory, which is off; send it in the request")
        return self.regions.lease(*place)

    def read(self, what: str, place: RegionPlace, reserve: Reserve | None) -> bytes:
        """Return a copy of an input. ``reserve`` is called with its size before it is made."""
        lease = self.lease(what, place)
        if reserve is not None:
            reserve(place.byte_size)
        return lease.read()

    def check_size(self, nbytes: int) -> None:
        """Raise InvalidRequest if ``nbytes``, those of a request's inputs in shared memory so far, are too many."""
        if nbytes > self.max_bytes:
            raise InvalidRequest(
                f"the inputs have {nbytes} bytes or more in shared memory, expected at most {self.max_bytes}"
                " (max_message_bytes, the largest request)"
            )
