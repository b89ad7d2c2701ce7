"""Counts running batches, and decides which may begin beside them. No threads; the owner guards it with a lock."""

from __future__ import annotations

from collections.abc import Callable, Hashable

from service.request import Request


class ExecutionSlots:
    """Room for ``instances`` batches of any shape, and for ``beside`` more whose shapes none of the running ones has.

    A request whose shape is running already should wait: joined with others of its shape it costs less. A request of
    another shape can never join that batch, and a long batch would hold it up (docs/decisions/0061).
    """

    def __init__(self, instances: int, beside: int) -> None:
        self._idle = instances
        self._beside = beside
        self._shapes: list[Hashable] = []  # of the batches that executors run
        self._requests: dict[
            int, tuple[Request, bool]
        ] = {}  # by id: requests that run on their caller's thread, and whether beside others
        self._unknown_requests = 0  # runs claimed before the request was known

    @property
    def idle(self) -> bool:
        """Whether a batch of any shape may begin."""
        return self._idle > 0

    @property
    def beside(self) -> int:
        """How many more batches may begin beside others, if they fit."""
        return self._beside

    def fits(self, shape: Hashable, shape_of: Callable[[Request], Hashable]) -> bool:
        """Return whether a batch of ``shape`` may begin beside those that run."""
        return (
            self._beside > 0
            and not self._unknown_requests
            and shape not in self._shapes
            and all(shape_of(request) != shape for request, _ in self._requests.values())
        )

    def caller_started(self, request: Request | None) -> None:
        """Count a run on a caller's thread, beside others if no instance is idle.

        ``request`` is None if it is not known yet.
        """
        beside = not self._idle
        self._count(-1, beside)
        if request is None:
            self._unknown_requests += 1
        else:
            self._requests[id(request)] = request, beside

    def caller_finished(self, request: Request | None) -> None:
        """End a caller's run, or a claim that was not used."""
        found = None if request is None else self._requests.pop(id(request), None)
        if found is None:
            self._unknown_requests -= 1
        self._count(1, found is not None and found[1])

    def batch_started(self, shape: Hashable, beside: bool) -> None:
        """Count a batch of an executor, in an idle instance or beside others."""
        self._shapes.append(shape)
        self._count(-1, beside)

    def batch_ended(self, shape: Hashable, beside: bool) -> None:
        self._shapes.remove(shape)
        self._count(1, beside)

    def _count(self, change: int, beside: bool) -> None:
        if beside:
            self._beside += change
        else:
            self._idle += change
