"""Which precision is to answer for each version, as the owner has ordered: also for what is loaded later."""

from __future__ import annotations

import threading
from concurrent.futures import Future

from bf16kit.errors import Unavailable
from service.drift.owner import Order
from service.models.slot import Slot


class Orders:
    """Remembers the newest order for each version, and has what answers there carry it out."""

    def __init__(self) -> None:
        self._orders: dict[tuple[str, int], Order] = {}
        self._lock = threading.Lock()

    def give(self, order: Order, slot: Slot | None) -> Future[None]:
        """``slot`` is the place that it is for. The future fails with Unavailable where something else answers there,
        or nothing; it is carried out when what it is for is :meth:`published`."""
        with self._lock:
            self._orders[order.model, order.version] = order
            told = None if slot is None else self._carry_out(slot)
        if told is None:
            told = Future()
            told.set_exception(Unavailable(f"model {order.model!r} version {order.version} is not loaded here"))
        return told

    def published(self, slot: Slot) -> None:
        """Something else answers there from now on. An order for what was there before is over: should that be loaded
        once more, it is another generation, of which nothing is known."""
        key, loaded = (slot.name, slot.version), slot.loaded
        with self._lock:
            order = self._orders.get(key)
            if order is not None and loaded is not None and order.plan != loaded[1].digest:
                del self._orders[key]
            self._carry_out(slot)

    def forget(self, slot: Slot) -> None:
        """What answers there is unloaded, and is to be itself when it is loaded again."""
        with self._lock:
            self._orders.pop((slot.name, slot.version), None)

    def _carry_out(self, slot: Slot) -> Future[None] | None:
        order, loaded = self._orders.get((slot.name, slot.version)), slot.loaded
        if order is None or loaded is None:
            return None
        model, plan = loaded
        return model.answer_with(order.precision, order.reason) if plan.digest == order.plan else None
