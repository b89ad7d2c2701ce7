"""Changes that wait for the reconciler's threads, and the futures of their callers."""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import Future
from dataclasses import dataclass, field

from service.models.plan import DesiredModel


@dataclass(slots=True)
class PendingChange:
    """A desired model, and the futures that end when it is applied or has failed."""

    desired: DesiredModel
    futures: list[Future[None]] = field(default_factory=list)


def complete(futures: Iterable[Future[None]], error: BaseException | None) -> None:
    """End the futures: with ``error``, or successfully for None."""
    for future in futures:
        if not future.set_running_or_notify_cancel():
            continue
        if error is None:
            future.set_result(None)
        else:
            future.set_exception(error)
