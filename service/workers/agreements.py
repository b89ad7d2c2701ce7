"""Agreement of all workers on each model's profile: the choice of the first worker that has measured."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import Any

from bf16kit.errors import Unavailable
from service.models.plan import Plan
from service.peers.channel import Body
from service.peers.peer import Message

KIND = "agree"
_MOST = 4096  # remembered choices; old plans are forgotten
_SECONDS = 10.0  # for the supervisor to answer


class Agreements:
    """The supervisor's side: remembers the choices, so that restarted workers get them too."""

    def __init__(self) -> None:
        self._chosen: dict[str, str] = {}
        self._lock = threading.Lock()

    def answer(self, worker: str, message: Message) -> Body:
        """Return the profile chosen for a plan, by its digest.

        The worker's own ``profile`` is chosen if there is none yet; "" only asks.
        """
        plan, profile = str(message.body["plan"]), str(message.body["profile"])
        with self._lock:
            chosen = self._chosen.get(plan, "")
            if not chosen and profile:
                while len(self._chosen) >= _MOST:
                    del self._chosen[next(iter(self._chosen))]
                chosen = self._chosen[plan] = profile
        return {"profile": chosen}


class AgreementProxy:
    """A worker's :class:`service.models.agreement.Agreement`. ``ask`` sends a request to the supervisor."""

    def __init__(self, plan: Plan, ask: Callable[[str, Mapping[str, Any]], Future[Body]]) -> None:
        self._plan = plan.digest
        self._ask = ask

    def known(self) -> str:
        return self.settle("")

    def settle(self, profile: str) -> str:
        try:
            answer = self._ask(KIND, {"plan": self._plan, "profile": profile}).result(_SECONDS)
        except TimeoutError:
            raise Unavailable(f"the supervisor did not say within {_SECONDS:g} s which profile to serve") from None
        return str(answer["profile"])
