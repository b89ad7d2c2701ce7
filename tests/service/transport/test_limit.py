"""The adaptive limit in overload and without, with the test's own clock."""

from __future__ import annotations

import grpc
import numpy as np
import pytest
from loopback import LoopbackModel, infer_request, serving

from bf16kit.errors import Overloaded
from service.request import Reply, Request
from service.transport.admission import Admission
from service.transport.limit import AdaptiveLimit


class Weather:
    def __init__(self, most: int = 256, least: int = 16) -> None:
        self.time = 0.0
        self.limit = AdaptiveLimit(most, least, clock=lambda: self.time)

    def blow(self, seconds: float, *, answers: int, refusals: int, taking: float, model: str = "m") -> int:
        """Report ``answers`` and ``refusals`` in every tenth of a second. Return the limit afterwards."""
        for _ in range(round(seconds * 10)):
            for _ in range(answers):
                self.limit.count_response(model, taking)
            for _ in range(refusals):
                self.limit.count_refusal()
            self.time += 0.11
            self.limit.count_response(model, taking)
        return self.limit.current


@pytest.fixture
def weather() -> Weather:
    """Return a limit that has had a second without rejections, in which responses took 5 ms."""
    weather = Weather()
    weather.blow(1, answers=20, refusals=0, taking=0.005)
    return weather


def test_the_limit_stays_while_no_request_is_rejected(weather: Weather) -> None:
    assert weather.blow(5, answers=20, refusals=0, taking=1.0) == 256


def test_the_limit_falls_to_its_minimum_in_overload(weather: Weather) -> None:
    assert weather.blow(3, answers=20, refusals=180, taking=1.0) == 16


def test_the_limit_falls_no_further_once_responses_are_fast(weather: Weather) -> None:
    weather.blow(0.4, answers=20, refusals=180, taking=1.0)
    between = weather.limit.current
    assert 16 < between < 256
    assert weather.blow(5, answers=20, refusals=180, taking=0.015) == between


def test_a_few_rejections_do_not_lower_the_limit(weather: Weather) -> None:
    assert weather.blow(5, answers=20, refusals=10, taking=1.0) == 256


def test_the_limit_recovers_within_seconds_after_overload(weather: Weather) -> None:
    weather.blow(3, answers=20, refusals=180, taking=1.0)
    assert weather.blow(2, answers=20, refusals=0, taking=0.005) == 256


def test_each_model_is_compared_with_its_own_response_time() -> None:
    """The slow model takes a second even without load; a faster model beside it does not make that count as slow."""
    weather = Weather()
    weather.blow(1, answers=20, refusals=0, taking=0.001, model="fast")
    weather.blow(1, answers=2, refusals=0, taking=1.0, model="slow")
    assert weather.blow(3, answers=2, refusals=100, taking=1.1, model="slow") == 256


def test_a_lasting_slowdown_becomes_the_models_normal_response_time(weather: Weather) -> None:
    weather.blow(60, answers=20, refusals=0, taking=0.05)
    assert weather.blow(3, answers=20, refusals=180, taking=0.06) == 256


def test_the_minimum_is_at_most_the_number_of_places() -> None:
    assert Weather(most=4).limit._least == 4


def test_a_rejection_by_a_models_queue_counts_as_overload(monkeypatch: pytest.MonkeyPatch) -> None:
    class Full(LoopbackModel):
        def infer(self, request: Request) -> Reply:
            raise Overloaded("the queue is full", "queue_full")

    told: list[AdaptiveLimit] = []
    monkeypatch.setattr(AdaptiveLimit, "count_refusal", lambda limit: told.append(limit))
    with serving(Full()) as served:
        code, _ = served.refusal("ModelInfer", infer_request(x=np.ones((1, 3), np.float32)))
    assert code is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert len(told) == 1


def test_rejections_at_the_door_count_only_while_the_limit_is_lowered() -> None:
    """Clients that hold all places and do nothing do not overload a model."""
    weather = Weather(most=4, least=1)
    admission = Admission(4, "calls", adaptive=weather.limit)
    full = [admission.admit(f"client {number}") for number in range(4)]
    weather.limit.count_response("m", 0.001)
    for _ in range(50):
        with pytest.raises(Overloaded):
            admission.admit("another")
        weather.time += 0.02
        weather.limit.count_response("m", 1.0)
    assert weather.limit.current == 4
    full.pop().release()
    weather.limit.current = 3
    for _ in range(50):
        with pytest.raises(Overloaded, match="3 calls is the limit of this server while models refuse most"):
            admission.admit("another")
    assert weather.limit._refused == 50


def test_a_rejection_for_a_models_share_does_not_count_as_overload(monkeypatch: pytest.MonkeyPatch) -> None:
    class Shared(LoopbackModel):
        def infer(self, request: Request) -> Reply:
            raise Overloaded("the model has its share", "model_share")

    told: list[AdaptiveLimit] = []
    monkeypatch.setattr(AdaptiveLimit, "count_refusal", lambda limit: told.append(limit))
    with serving(Shared()) as served:
        code, _ = served.refusal("ModelInfer", infer_request(x=np.ones((1, 3), np.float32)))
    assert code is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert told == []
