"""The first worker that has measured chooses for all workers, and for those that are started later."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bf16kit.errors import Unavailable
from service.models.plan import Plan
from service.models.policy import Serving
from service.peers.channel import Body
from service.peers.peer import Message
from service.workers import agreements
from service.workers.agreements import AgreementProxy, Agreements

PLAN = Plan(1, Path("m/1"), Serving(), "1-2-3")


class Asking:
    """Passes requests to the supervisor directly, without the pipe."""

    def __init__(self) -> None:
        self.agreements = Agreements()

    def __call__(self, kind: str, body: Mapping[str, Any]) -> Future[Body]:
        assert kind == agreements.KIND
        told: Future[Body] = Future()
        told.set_result(self.agreements.answer("worker 1", Message(dict(body))))
        return told


def test_the_first_choice_holds_for_all_workers() -> None:
    ask = Asking()
    one, two = AgreementProxy(PLAN, ask), AgreementProxy(replace(PLAN), ask)
    assert (one.known(), two.known()) == ("", "")
    assert one.settle("cpu-bf16") == "cpu-bf16"
    assert two.settle("cpu") == "cpu-bf16"
    assert AgreementProxy(PLAN, ask).known() == "cpu-bf16"


@pytest.mark.parametrize(
    "other",
    [
        replace(PLAN, version=2),
        replace(PLAN, path=Path("n/1")),
        replace(PLAN, stamp="1-2-4"),
        replace(PLAN, serving=Serving(max_batch_size=4)),
    ],
    ids=["version", "model", "artifact", "serving.yaml"],
)
def test_a_different_plan_needs_a_new_choice(other: Plan) -> None:
    ask = Asking()
    AgreementProxy(PLAN, ask).settle("cpu-bf16")
    assert AgreementProxy(other, ask).known() == ""


def test_the_number_of_remembered_choices_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agreements, "_MOST", 2)
    ask = Asking()
    for version in (1, 2, 3):
        AgreementProxy(replace(PLAN, version=version), ask).settle("cpu")
    assert [AgreementProxy(replace(PLAN, version=v), ask).known() for v in (1, 2, 3)] == ["", "cpu", "cpu"]


def test_a_load_fails_with_a_reason_if_the_supervisor_does_not_respond(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agreements, "_SECONDS", 0.01)
    with pytest.raises(Unavailable, match="supervisor"):
        AgreementProxy(PLAN, lambda kind, body: Future()).known()
