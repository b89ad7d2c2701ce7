"""Send ten times as many requests as the server can answer, from another process that does not wait for responses."""

from collections.abc import Callable
from statistics import median

import figures
import pytest
from attacked import Target
from figures import amount
from offered import INFER, Requests, wrong
from waiting import until

from bench.serving.http2 import NOT_SENT, closed_loop
from bench.serving.openloop import Offering, Outcome

pytestmark = pytest.mark.hostile
_CONNECTIONS = 16
_CALM_SHARE = 0.1  # of capacity
_CALM_SECONDS = 1.0
_BURST = 100  # calls at once: fewer than half of the server's limit
_AS_BEFORE, _ATTEMPTS = 1.5, 10


def offered(target: Target, requests: Requests, rate: float, seconds: float) -> Outcome:
    return Offering(target.port, requests.messages, rate=rate, seconds=seconds, connections=_CONNECTIONS).outcome()


def capacity(target: Target, requests: Requests) -> float:
    """Return the calls a second of a closed loop, four at a time: few enough that none is rejected."""
    return len(closed_loop(target.port, INFER, requests.messages[0], 4, _CALM_SECONDS)) / _CALM_SECONDS


def test_tenfold_overload_gets_correct_responses_or_rejections_and_latency_recovers(
    attack: Callable[..., Target],
) -> None:
    target, requests = attack(), Requests()
    expected = requests.ask(target.address)
    rate = capacity(target, requests)
    offered(target, requests, 10 * rate, amount(1, 15))  # creates the threads and heaps that are created once
    calm = offered(target, requests, _CALM_SHARE * rate, _CALM_SECONDS)
    with target.stays_healthy():
        storm = offered(target, requests, 10 * rate, amount(4, 60))
    after: list[Outcome] = []  # repeated if the machine is busy with something else
    while len(after) < _ATTEMPTS and (not after or median(after[-1].answered) > _AS_BEFORE * median(calm.answered)):
        after.append(offered(target, requests, _CALM_SHARE * rate, _CALM_SECONDS))
    until(lambda: offered(target, requests, 1e4, _BURST / 1e4).counts.keys() == {"OK"}, what="a burst being let in")
    figures.record(
        how_much=f"{storm.offered:,} calls at {10 * rate:,.0f}/s, capacity {rate:,.0f}/s",
        **{word: f"{count:,}" for word, count in storm.counts.items()},
        goodput=f"{len(storm.answered) / (rate * amount(4, 60)):.2f}",
        served_p50_ms=_ms(storm, "served", 0.5),
        refused_p50_ms=_ms(storm, "refused", 0.5),
        calm_p50_ms_before=_ms(calm, "answered", 0.5),
        calm_p50_ms_after=_ms(after[-1], "answered", 0.5),
    )
    assert storm.lost == 0
    assert wrong(storm, expected) == 0
    # Most calls wait in the clients for their turn, and are not sent within the second that these have.
    assert storm.counts.keys() <= {"OK", "RESOURCE_EXHAUSTED", NOT_SENT}
    assert len(storm.answered) > 0.6 * rate * amount(4, 60), "it answers as before, whatever it refuses"
    for quiet in (calm, *after):
        assert quiet.counts.keys() == {"OK"}, quiet.said
    assert median(after[-1].answered) <= _AS_BEFORE * median(calm.answered)


def _ms(outcome: Outcome, of: str, share: float) -> str:
    return f"{outcome.percentile(of, share) * 1e3:.1f}"
