"""A worker runs the requested side in the requested cache state, and responds when its threads sleep."""

import pytest

from bench.kernel import worker
from bench.kernel.hosts import Prepared
from bench.kernel.worker import Worker


class Buffer:
    """Stand-in for the buffer that empties the caches; it logs each read."""

    def __init__(self, log: list[str]) -> None:
        self._log = log

    def sum(self) -> None:
        self._log.append("flush")


@pytest.mark.parametrize(
    ("usual", "cold", "log"),
    [
        (0.001, True, ["run", "flush", "run", "flush", "run"]),  # the first run warms up
        (0.001, False, ["run"] * 3),
        (0.2, False, ["run"] * 2),  # a slow side has no warm-up
    ],
)
def test_the_caches_are_emptied_before_every_cold_run_that_counts(
    monkeypatch: pytest.MonkeyPatch, usual: float, cold: bool, log: list[str]
) -> None:
    monkeypatch.setattr(worker, "last_level_cache", lambda: 8)
    found: list[str] = []
    made = Worker()
    made._flush = Buffer(found)  # type: ignore[assignment]
    made._prepared["side"] = Prepared(lambda: found.append("run"))
    made._usual["side"] = usual
    assert len(made.time({"side": "side", "runs": 2, "cold": cold})["seconds"]) == 2
    assert found == log
    made._prepared["side"] = Prepared(lambda: 7.0, measures=True)  # a limit measures its own seconds
    assert made.time({"side": "side", "runs": 2, "cold": False}) == {"seconds": [7.0, 7.0]}
