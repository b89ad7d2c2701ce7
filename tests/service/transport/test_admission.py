"""The bound on what is inside."""

from __future__ import annotations

import pytest

from bf16kit.errors import Overloaded
from service.transport.admission import Admission


def test_one_more_than_the_limit_is_refused_and_says_the_limit() -> None:
    door = Admission(2, "requests in flight")
    with door, door, pytest.raises(Overloaded, match="2 requests in flight is the limit"), door:
        pass


def test_a_place_is_free_again_after_an_error() -> None:
    door = Admission(1, "requests")
    for _ in range(3):
        with pytest.raises(ValueError, match="inside"), door:
            raise ValueError("inside")
