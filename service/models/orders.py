"""The fallback controller's orders: which precision answers for each version, also for versions loaded later."""

from __future__ import annotations

import threading
from concurrent.futures import Future

from bf16kit.messages.errors import Unavailable
from service.drift.fallbackcontroller import PrecisionOrder
from service.models.slot import Slot


class PrecisionOrders:
    """Remembers the newest order for each version, and applies it to the generation that answers."""

    def __init__(self) -> None:
        self._orders: dict[tuple[str, int], PrecisionOrder] = {}
        self._lock = threading.Lock()

    def apply(self, order: PrecisionOrder, slot: Slot | None) -> Future[None]:
        """Remember the order, and apply it in ``slot``, the slot of its model and version.

        The future fails with Unavailable if another generation answers there, or none. The order is then applied when
        the generation that it is for is :meth:`on_published`.
        """
        with self._lock:
            self._orders[order.model, order.version] = order
            future = None if slot is None else self._apply(slot)
        if future is None:
            future = Future()
            future.set_exception(Unavailable(f"model {order.model!r} version {order.version} is not loaded here"))
        return future

    def on_published(self, slot: Slot) -> None:
        """Apply the order to the slot's new generation. An order for another plan is dropped.

        If that other plan is loaded again, it is a new generation, of which nothing is known yet.
        """
        key, loaded = (slot.name, slot.version), slot.loaded
        with self._lock:
            order = self._orders.get(key)
            if order is not None and loaded is not None and order.plan != loaded[1].digest:
                del self._orders[key]
            self._apply(slot)

    def forget(self, slot: Slot) -> None:
        """Drop the order of a slot that is unloaded: when loaded again, the model begins with bf16."""
        with self._lock:
            self._orders.pop((slot.name, slot.version), None)

    def _apply(self, slot: Slot) -> Future[None] | None:
        order, loaded = self._orders.get((slot.name, slot.version)), slot.loaded
        if order is None or loaded is None:
            return None
        model, plan = loaded
        return model.switch_precision(order.precision, order.reason) if plan.digest == order.plan else None
