"""The fallback controller's view of a server with one process."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future

from bf16kit.messages.errors import RequestError
from service.drift.fallbackcontroller import ActivePlan, PrecisionOrder
from service.models.repository import Repository
from service.request import Precision


class SingleProcess:
    """See :class:`service.drift.fallbackcontroller.ServingProcesses`."""

    def __init__(self, repository: Callable[[], Repository]) -> None:
        self._repository = repository

    def active_plan(self, model: str, version: int) -> ActivePlan | None:
        try:
            loaded = self._repository().find(model, str(version)).loaded
        except RequestError:  # it was unloaded
            return None
        if loaded is None:
            return None
        generation, plan = loaded
        return ActivePlan(plan.digest, generation.since, plan.serving.fallback)

    def order(self, order: PrecisionOrder) -> Future[None]:
        return self._repository().order(order)

    def transition(self, model: str, version: int, to: Precision) -> None:
        self._repository().transition(model, version, to)
