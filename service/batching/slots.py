"""Which batches run, and what may begin beside them. No thread, no lock: whoever owns them guards them with one."""

from __future__ import annotations

from collections.abc import Callable, Hashable

from service.request import Request


class Slots:
    """``instances`` batches of any shape at once, and ``beside`` them so many more of shapes that none of those has.

    A request whose shape runs already does better to wait: together with others of its shape it costs less. One of
    another shape can never join that batch, and a long one would hold it up (docs/decisions/0061).
    """

    def __init__(self, instances: int, beside: int) -> None:
        self._idle = instances
        self._beside = beside
        self._shapes: list[Hashable] = []  # of the batches that executors run
        self._requests: dict[int, tuple[Request, bool]] = {}  # by id, those that their callers run, and whether beside
        self._unknown = 0  # claimed before there was a request

    @property
    def idle(self) -> bool:
        """Whether a batch of any shape may begin."""
        return self._idle > 0

    @property
    def beside(self) -> int:
        """How many batches may begin beside others, if they fit."""
        return self._beside

    def fits(self, shape: Hashable, shape_of: Callable[[Request], Hashable]) -> bool:
        """Whether a batch of ``shape`` may begin beside those that run."""
        return (
            self._beside > 0
            and not self._unknown
            and shape not in self._shapes
            and all(shape_of(request) != shape for request, _ in self._requests.values())
        )

    def claimed(self, request: Request | None) -> None:
        """A caller runs ``request`` itself, or (None) one that it does not know yet; beside others if none is idle."""
        beside = not self._idle
        self._count(-1, beside)
        if request is None:
            self._unknown += 1
        else:
            self._requests[id(request)] = request, beside

    def left(self, request: Request | None) -> None:
        """A caller's run is over, or will not be."""
        found = None if request is None else self._requests.pop(id(request), None)
        if found is None:
            self._unknown -= 1
        self._count(1, found is not None and found[1])

    def begun(self, shape: Hashable, beside: bool) -> None:
        """An executor runs a batch: in an idle run, or beside others."""
        self._shapes.append(shape)
        self._count(-1, beside)

    def ended(self, shape: Hashable, beside: bool) -> None:
        self._shapes.remove(shape)
        self._count(1, beside)

    def _count(self, change: int, beside: bool) -> None:
        if beside:
            self._beside += change
        else:
            self._idle += change
