"""Which requests are traced: Triton's settings, for the server and for one model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pytest

from bf16kit.messages.errors import InvalidRequest, NotFound
from service.telemetry.settings import TraceSettings

_Changes = Mapping[str, Sequence[str]]


def known(model: str) -> None:
    if model not in ("a", "b"):
        raise NotFound(f"unknown model {model!r}")


def settings(rate: int = 3) -> TraceSettings:
    return TraceSettings(rate, find=known)


def traced(of: TraceSettings, requests: int, model: str = "a", asked: bool | None = None) -> list[int]:
    """Return which of ``requests`` requests are traced, counted from 1."""
    return [i for i in range(1, requests + 1) if of.sampled(model, asked)]


def test_one_of_rate_requests_is_traced_whatever_its_model() -> None:
    one = settings(3)
    assert traced(one, 7) == [3, 6]
    assert traced(one, 3, "b") == [2]
    assert traced(one, 3, "never heard of") == [2]


def test_a_requests_own_trace_context_decides_whether_it_is_traced_unless_tracing_is_off() -> None:
    assert traced(settings(1000), 3, asked=True) == [1, 2, 3]
    assert traced(settings(1), 3, asked=False) == []
    one = settings(1)
    one.update({"trace_level": ("OFF",)})
    assert [one.on] == [False]
    assert traced(one, 3) == traced(one, 3, asked=True) == []
    one.update({"trace_level": ("TIMESTAMPS",)})
    assert [one.on] == [True]
    assert traced(one, 2) == [1, 2]


def test_a_trace_count_runs_out_and_shows_the_rest() -> None:
    one = settings(2)
    one.update({"trace_count": ("3",)})
    assert traced(one, 2) == [2]
    assert one.update({})["trace_count"] == ("2",)
    assert traced(one, 9) == [2, 4]
    assert one.update({})["trace_count"] == ("0",)
    assert traced(one, 9, asked=True) == []
    one.update({"trace_count": ("-1",)})
    assert traced(one, 4) == [2, 4]


def test_a_models_settings_override_the_servers_until_they_are_cleared() -> None:
    one = settings(4)
    one.update({"trace_rate": ("1",), "trace_count": ("2",)}, "a")
    assert traced(one, 5, "a") == [1, 2]
    assert traced(one, 5, "b") == [4]
    one.update({"trace_level": ("OFF",)})
    one.update({"trace_level": ("TIMESTAMPS",), "trace_count": ()}, "a")
    assert (traced(one, 3, "a"), traced(one, 8, "b")) == ([1, 2, 3], [])
    back = one.update({"trace_level": (), "trace_rate": ()}, "a")
    assert (back["trace_level"], back["trace_rate"]) == (("OFF",), ("4",))
    assert not one.on

    one = settings(1)  # a model without a count uses the server's
    one.update({"trace_count": ("2",)})
    one.update({"trace_rate": ("1",)}, "a")
    assert (traced(one, 1, "a"), traced(one, 3, "b"), traced(one, 3, "a")) == ([1], [1], [])


def test_settings_are_strings_under_tritons_names_and_cleared_ones_return_to_their_start_values() -> None:
    one = settings(3)
    one.update({"trace_level": ("OFF",), "trace_rate": ("2",), "trace_count": ("5",)})
    assert one.update(dict.fromkeys(("trace_level", "trace_rate", "trace_count"), ())) == {
        "trace_level": ("TIMESTAMPS",), "trace_rate": ("3",), "trace_count": ("-1",),
        "log_frequency": ("0",), "trace_file": ("",), "trace_mode": ("opentelemetry",),
    }  # fmt: skip
    assert one.on


def test_with_a_rate_of_0_tracing_is_off_and_cannot_be_enabled() -> None:
    one = settings(0)
    assert (one.on, one.update({})["trace_level"], one.update({})["trace_rate"]) == (False, ("OFF",), ("1000",))
    with pytest.raises(InvalidRequest, match="exports no traces; start it with a trace_rate"):
        one.update({"trace_level": ("TIMESTAMPS",)})
    assert traced(one, 2, asked=True) == []


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        ({"trace_file": ("/etc/passwd",)}, "trace_file cannot be changed: a client must not choose a file"),
        ({"trace_mode": ("triton",)}, "trace_mode cannot be changed"),
        ({"log_frequency": ("5",)}, "log_frequency cannot be changed"),
        ({"trace_level": ("TENSORS",)}, "tensors are never part of a trace"),
        ({"trace_level": ("OFF", "TIMESTAMPS")}, "trace_level is 'OFF,TIMESTAMPS'"),
        ({"trace_rate": ("0",)}, "trace_rate is '0'; give one integer from 1 to 2147483647"),
        ({"trace_rate": ("1.5",)}, "trace_rate is '1.5'"),
        ({"trace_rate": ("1", "2")}, "trace_rate is '1,2'"),
        ({"trace_rate": ("²",)}, "trace_rate is"),
        ({"trace_count": ("-2",)}, "trace_count is '-2'; give one integer from -1"),
        ({"trace_count": ("9" * 5000,)}, "trace_count is"),
        ({"trace_rat": ("2",)}, "unknown trace setting 'trace_rat'; the settings are trace_level, trace_rate"),
    ],
)
def test_one_wrong_setting_leaves_all_settings_unchanged(wrong: _Changes, why: str) -> None:
    one = settings(3)
    with pytest.raises(InvalidRequest, match=why):
        one.update({"trace_rate": ("2",), **wrong})
    for changes in ({}, {"trace_rate": ("1",)}):
        with pytest.raises(NotFound, match="unknown model 'c'"):
            one.update(changes, "c")
    assert one.update({}) == settings(3).update({})
