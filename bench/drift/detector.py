"""The change detector over weeks of simulated traffic: false alarms when all is well, and samples until an alarm.

MiniLM's own rows come from the ``measurements.json`` of a conversion made here; the other kinds of traffic are worse
than any that it was seen to have. Each stream's detector is calibrated by rows of its own.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from bench.core.results import Measurement, Result
from bench.core.workspace import Workspace
from bench.drift.streams import Case, Draw, Floats, delays, false_alarms
from bf16kit.artifact.artifact import Artifact
from service.drift.detector import WEEK

WEEKS = 10
_STREAMS = 64
_RUNS = 1000
CORRUPTED = 8.0  # times the drift: the least that a corrupted weight is taken to cost


def _normal(rng: np.random.Generator, steps: int, streams: int) -> Floats:
    return rng.standard_normal((steps, streams))


def _heavy(rng: np.random.Generator, steps: int, streams: int) -> Floats:
    """Student's t of three degrees of freedom, with a standard deviation of 1."""
    return rng.standard_t(3, (steps, streams)) / math.sqrt(3)


def _skewed(rng: np.random.Generator, steps: int, streams: int) -> Floats:
    return rng.exponential(1.0, (steps, streams)) - 1.0


def _sticky(rng: np.random.Generator, steps: int, streams: int) -> Floats:
    """Neighbours alike: a correlation of 0.8, of streams that are ordered as traffic of one user is."""
    found = rng.standard_normal((steps, streams))
    for at in range(1, steps):
        found[at] = 0.8 * found[at - 1] + 0.6 * found[at]
    return found


def resampled(rows: Sequence[float]) -> Case:
    """MiniLM's measured rows, drawn again and again."""
    logs = np.log(np.asarray(rows, np.float64))
    spread, about = float(logs.std()), (logs - logs.mean()) / logs.std()

    def draw(rng: np.random.Generator, steps: int, streams: int) -> Floats:
        return np.asarray(rng.choice(about, (steps, streams)))

    return Case(f"MiniLM's rows, spread {spread:.2f}", spread, draw)


def cases() -> list[Case]:
    """Kinds of traffic without a model."""

    def case(name: str, spread: float, draw: Draw, **others: float) -> Case:
        return Case(f"{name}, spread {spread:g}", spread, draw, **others)  # type: ignore[arg-type]  # rows is whole

    return [
        *(case("normal", spread, _normal) for spread in (0.1, 0.3, 0.5)),
        *(case("t with 3 degrees", spread, _heavy) for spread in (0.1, 0.3)),
        case("exponential", 0.3, _skewed),
        case("neighbours correlated 0.8", 0.1, _sticky),
        case("drifting by 1.3 for good", 0.1, _normal, shift=1.3),
        case("calibrated by 50 rows", 0.1, _normal, rows=50),
    ]


def measure(workspace: Workspace, *, quick: bool) -> Result:
    """False alarms a week at one sample a second, with Poisson's 95 % interval; the 99th percentile of delays."""
    weeks = 0.05 if quick else WEEKS
    measured = None if quick else Artifact.open(workspace.minilm()).measurements()
    outputs = {} if measured is None else measured.profiles["cpu"].outputs
    known = [resampled(columns.relative_l2) for columns in outputs.values()][:1]
    found: list[Measurement] = []
    for index, case in enumerate([*known, *cases()]):
        rng = np.random.default_rng(index)
        alarms = false_alarms(case, int(weeks * WEEK), _STREAMS, rng)
        low, high = poisson(alarms)
        found.append(
            Measurement(
                f"{case.name}: false alarms a week",
                alarms / weeks,
                at_most=1.0,
                interval=(low / weeks, high / weeks),
                detail=f"{alarms} in {weeks:g} weeks",
            )
        )
        for what, factor, most in (("a doubling", 2.0, 200), (f"{CORRUPTED:g} times", CORRUPTED, 50)):
            taken = delays(case, factor, 50 if quick else _RUNS, rng)
            name = f"{case.name}: samples until {what} is seen, 99th percentile"
            found.append(
                Measurement(
                    name,
                    float(np.quantile(taken, 0.99, method="higher")),
                    at_most=most,
                    detail=f"median {np.median(taken):g}",
                )
            )
    return Result(
        "drift_detector",
        tuple(found),
        settings={"weeks of each": weeks, "samples a second": 1, "streams": _STREAMS, "changes of each": _RUNS},
        notes=("simulated: drift is drawn, no model runs",),
    )


def poisson(count: int) -> tuple[float, float]:
    """The 95 % interval of a rate of which ``count`` events were seen (F. Garwood, Biometrika 28, 1936), by Wilson and
    Hilferty's chi-squared."""

    def limit(freedom: int, z: float) -> float:
        part = 2 / (9 * freedom)
        return freedom / 2 * (1 - part + z * math.sqrt(part)) ** 3

    # Wilson and Hilferty's is too low at two degrees of freedom, where the limit is known: -ln 0.025.
    high = -math.log(0.025) if count == 0 else limit(2 * count + 2, 1.959964)
    return (limit(2 * count, -1.959964) if count else 0.0), high
