"""An order of a precision for a version applies only to a generation loaded by the plan that the order names."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from artifacts import write_mlp
from beginning import leased
from waiting import until

from bf16kit.messages.errors import Unavailable
from service.contract import infer
from service.drift.contract import DriftVerdict, FallbackPolicy
from service.drift.fallbackcontroller import FallbackController, PrecisionOrder
from service.models.directory import stamp_of
from service.models.plan import DesiredModel, Plan
from service.models.repository import Repository
from service.models.serving import Serving
from service.request import Request
from service.telemetry.metrics import Metrics

X = np.ones((1, 16), np.float32)


@pytest.fixture
def plan(tmp_path: Path) -> Plan:
    write_mlp(tmp_path / "mlp" / "1")
    path = tmp_path / "mlp" / "1"
    return Plan(1, path, Serving(max_queue_size=1), stamp_of(path))


@pytest.fixture
def metrics() -> Metrics:
    return Metrics()


@pytest.fixture
def repository(metrics: Metrics) -> Iterator[Repository]:
    repository = Repository(metrics, device="cpu", threads=1)
    yield repository
    assert repository.close(20)


def serve(repository: Repository, *plans: Plan) -> None:
    repository.apply(DesiredModel("mlp", plans)).result(60)


def order(plan: Plan, precision: str = "fp32") -> PrecisionOrder:
    return PrecisionOrder("mlp", 1, plan.digest, precision, "drift")  # type: ignore[arg-type]  # one of its literals


def precision(repository: Repository) -> str:
    with leased(repository.acquire, "mlp", "1") as model:
        return infer(model, Request({"x": X})).reported_precision


@pytest.mark.long
def test_an_ordered_precision_serves_and_a_replacement_begins_with_bf16(
    repository: Repository, plan: Plan, metrics: Metrics
) -> None:
    repository.start()
    serve(repository, plan)
    server = repository
    before = server.active_plan("mlp", 1)
    assert before is not None
    assert (before.plan, before.policy) == (plan.digest, plan.serving.fallback)
    server.order(order(plan)).result(60)
    assert precision(repository) == "fp32"
    assert 'bf16kit_answers_total{model="mlp",precision="fp32",version="1"} 1.0' in metrics.expose()[0].decode()
    another = replace(plan, serving=Serving(max_queue_size=2))
    serve(repository, another)
    assert precision(repository) == "bf16"
    assert 'bf16kit_fallback_active{model="mlp",version="1"} 0.0' in metrics.expose()[0].decode()
    with pytest.raises(Unavailable, match="is not loaded here"):
        server.order(order(plan)).result(60)
    after = server.active_plan("mlp", 1)
    assert after is not None
    assert after[:2] != before[:2]
    server.transition("mlp", 1, "fp32")
    told = 'bf16kit_fallback_transitions_total{model="mlp",to="fp32",version="1"} 1.0'
    assert told in metrics.expose()[0].decode()


@pytest.mark.long
def test_an_order_given_before_the_load_is_applied_after_it(repository: Repository, plan: Plan) -> None:
    """A restarted worker then serves in the same precision as the other workers. It needs no second order."""
    done: Future[None] = Future()

    def look() -> None:
        slot = repository.find("mlp", "1")
        if slot.model is not None and slot.model.active_precision.precision == "fp32" and not done.done():
            done.set_result(None)

    loading = repository.apply(DesiredModel("mlp", (plan,)))
    with pytest.raises(Unavailable):
        repository.order(order(plan)).result(0)
    repository.subscribe(look)
    repository.start()
    loading.result(60)
    done.result(60)
    with leased(repository.acquire, "mlp", "1") as model:
        assert model.active_precision.reason == "drift"
    assert precision(repository) == "fp32"


@pytest.mark.long
@pytest.mark.parametrize("between", [False, True])
def test_a_plan_loaded_again_begins_with_bf16(repository: Repository, plan: Plan, between: bool) -> None:
    """It is a new generation, to which the order for the earlier one does not apply.

    Neither a verdict nor a call of ``maintain`` is needed for that, whether another plan was loaded between or none.
    """
    policy = FallbackPolicy(policy="fp32", min_stay_seconds=0)
    plan, another = (replace(plan, serving=Serving(max_queue_size=size, fallback=policy)) for size in (1, 2))
    owner = FallbackController(repository, lambda *key: None)
    over = DriftVerdict("mlp", 1, "over", "rounding", "y", "relative_l2", 2.0, 1.5, 2.5, 300.0, 300, False, 0.0)
    repository.start()
    serve(repository, plan)
    owner.receive(replace(over, at=time.time(), plan=plan.digest))
    until(lambda: precision(repository) == "fp32", 60, "answered by fp32")
    serve(repository, *([another] if between else []))
    assert (repository.active_plan("mlp", 1) is None) is not between
    serve(repository, plan)
    assert "model 'mlp' version 1-fp32" not in [thread.name for thread in threading.enumerate()], "nothing is loaded"
    assert precision(repository) == "bf16"
