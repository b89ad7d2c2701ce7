from __future__ import annotations

import math
import threading
import time

import pytest

from service.models.lease import Lease, Leases


def test_a_lease_is_held_until_its_context_is_left_whatever_happens_in_it() -> None:
    leases = Leases()
    assert leases.take()

    def work() -> None:
        with Lease(leases, "model") as held:
            assert held == "model"
            assert not leases.wait(time.monotonic())
            raise ValueError("inside")

    with pytest.raises(ValueError, match="inside"):
        work()
    assert leases.wait(time.monotonic())


def test_nobody_gets_one_after_the_end_and_those_who_hold_one_keep_it() -> None:
    leases = Leases()
    assert leases.take()
    leases.end()
    assert not leases.take()
    assert not leases.wait(time.monotonic())
    leases.give_back()
    assert leases.wait(time.monotonic())


def test_waiting_ends_with_the_last_holder() -> None:
    leases = Leases()
    assert leases.take()
    assert leases.take()
    leases.end()
    waiting = threading.Thread(target=leases.wait, args=(math.inf,))
    waiting.start()
    leases.give_back()
    assert waiting.is_alive()
    leases.give_back()
    waiting.join(30)
    assert not waiting.is_alive()
