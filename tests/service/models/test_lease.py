from __future__ import annotations

import math
import threading
import time

import pytest

from service.models.lease import Lease, Leases


def test_a_lease_is_held_until_its_context_ends_even_by_an_error() -> None:
    leases = Leases()
    assert leases.acquire()

    def work() -> None:
        with Lease(leases, "model") as held:
            assert held == "model"
            assert not leases.wait(time.monotonic())
            raise ValueError("inside")

    with pytest.raises(ValueError, match="inside"):
        work()
    assert leases.wait(time.monotonic())


def test_no_lease_is_given_after_the_end_and_existing_leases_stay_valid() -> None:
    leases = Leases()
    assert leases.acquire()
    leases.end()
    assert not leases.acquire()
    assert not leases.wait(time.monotonic())
    leases.release()
    assert leases.wait(time.monotonic())


def test_waiting_ends_with_the_last_holder() -> None:
    leases = Leases()
    assert leases.acquire()
    assert leases.acquire()
    leases.end()
    waiting = threading.Thread(target=leases.wait, args=(math.inf,))
    waiting.start()
    leases.release()
    assert waiting.is_alive()
    leases.release()
    waiting.join(30)
    assert not waiting.is_alive()
