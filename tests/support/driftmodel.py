"""What docs/drift.md and decision 0054 say of live drift, computed plainly and slowly from lists of rows.

It shares no code with the service. Where the documents name a formula, it is that formula. Left out: slices, rows
beyond a request's eighth unless they are alike, and the limit of 2,048 requests, which examples test.
"""

import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import accumulate
from typing import NamedTuple

HALF_LIFE, FEWEST = 400, 8.0  # requests; effective samples for an interval
NARROW, WIDE, WIDE_RANKS = 1.959963984540054, 4.5, 4.75  # standard errors
NOISE = 2.0**-18  # drift between two fp32 programs
CLIP, ALLOWANCE = math.log(64), 0.6 * math.log(2)
TEN_WEEKS, SOONEST, LEARN = 10 * 7 * 86_400, 10, 200  # samples, requests, rows


class Row(NamedTuple):
    relative_l2: float
    max_abs: float
    nonfinite: int
    is_top1: bool


class Request(NamedTuple):
    rows: tuple[Row, ...]
    weight: float
    client: str

    @property
    def total(self) -> float:
        return self.weight * len(self.rows)


def size_of(window: Sequence[Request]) -> float:
    """Return Kish's effective size, counted in requests."""
    squares = math.fsum(each.total**2 for each in window)
    return math.fsum(each.total for each in window) ** 2 / squares if squares else 0.0


# --- intervals --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Judged:
    """Drift ÷ budget of one bound, its 95 % interval, and the lower end of the wide one."""

    bound: str
    ratio: float
    low: float
    high: float
    lowest: float
    can_confirm: bool = True

    @property
    def within(self) -> bool:
        return self.high <= 1 or (not self.can_confirm and self.ratio <= 1)


def judge(window: Sequence[Request], budget: Mapping[str, float], *, logits: bool) -> list[Judged]:
    return [
        found for bound, most in budget.items() if (found := _judge(window, bound, most, logits=logits)) is not None
    ]


def _judge(window: Sequence[Request], bound: str, most: float, *, logits: bool) -> Judged | None:
    metric, _, part = bound.partition(".")
    if metric == "top1_agreement":
        return _agreement(window, most) if logits else None
    values = [(getattr(row, metric), each.weight) for each in window for row in each.rows]
    if metric == "nonfinite":
        found = math.inf if any(value for value, _ in values) else 0.0
        return Judged(bound, found, found, found, found)
    worst = max(value for value, _ in values)
    if part == "worst" or metric == "max_abs":
        return Judged(bound, worst / most, worst / most, worst / most, worst / most)
    if part:
        return _quantile(window, bound, values, {"p50": 0.5, "p99": 0.99}[part], most)
    if math.isinf(worst):
        return Judged(bound, math.inf, math.inf, math.inf, math.inf)
    return _mean(window, bound, metric, most)


def _mean(window: Sequence[Request], bound: str, metric: str, most: float) -> Judged:
    total, size = math.fsum(each.total for each in window), size_of(window)
    sums = [(each.weight, [getattr(row, metric) for row in each.rows]) for each in window]
    mean = math.fsum(weight * math.fsum(values) for weight, values in sums) / total
    if size < FEWEST:
        return Judged(bound, mean / most, 0.0, math.inf, 0.0)
    squares = math.fsum((weight * math.fsum(value - mean for value in values)) ** 2 for weight, values in sums)
    relative = math.sqrt(squares * size / (size - 1)) / total / mean if mean else 0.0
    narrow, wide = (math.exp(relative * _student(size - 1, z)) for z in (NARROW, WIDE))
    return Judged(bound, mean / most, mean / most / narrow, mean / most * narrow, mean / most / wide)


def _student(freedom: float, z: float) -> float:
    """Gaver and Kafadar's approximation, 1984."""
    return math.sqrt(freedom * (math.exp(z * z * (freedom - 1.5) / (freedom - 1) ** 2) - 1))


def _quantile(
    window: Sequence[Request], bound: str, values: list[tuple[float, float]], share: float, most: float
) -> Judged:
    n, ordered = int(size_of(window)), sorted(values)
    below = list(accumulate(weight for _, weight in ordered))

    def at(part: float) -> float:
        return ordered[min(len(ordered) - 1, bisect_left(below, (part - 1e-9) * below[-1]))][0] / most

    if n < FEWEST:
        return Judged(bound, at(share), 0.0, math.inf, 0.0)
    (low, high), (lowest, _) = (_ranks(n, share, z) for z in (NARROW, WIDE_RANKS))
    upper = at(high / n) if high <= n else math.inf
    ends = [at(rank / n) if rank else 0.0 for rank in (low, lowest)]
    return Judged(bound, at(share), ends[0], upper, ends[1], high <= n)


@cache
def _ranks(n: int, share: float, z: float) -> tuple[int, int]:
    """Return Thompson's ranks: each end is passed with the probability of ``z`` in one tail."""
    tail = math.erfc(z / math.sqrt(2)) / 2
    shares = list(accumulate(math.comb(n, k) * share**k * (1 - share) ** (n - k) for k in range(n)))
    return sum(p <= tail for p in shares), next((k + 1 for k, p in enumerate(shares) if p >= 1 - tail), n + 1)


def _agreement(window: Sequence[Request], least: float) -> Judged:
    size, total = size_of(window), math.fsum(each.total for each in window)
    share = min(1.0, math.fsum(each.weight * sum(row.is_top1 for row in each.rows) for each in window) / total)
    allowed = 1 - least
    if size < FEWEST:
        return Judged("top1_agreement", (1 - share) / allowed, 0.0, 1 / allowed, 0.0)
    low, high = _wilson(share, size)
    highest = max(high, _chernoff(share, size))
    can_confirm = (1 - _wilson(1.0, size)[0]) / allowed <= 1
    ratio, best, most, lowest = ((1 - each) / allowed for each in (share, high, low, highest))
    return Judged("top1_agreement", ratio, best, most, lowest, can_confirm)


def _wilson(share: float, n: float) -> tuple[float, float]:
    middle = (share + NARROW**2 / (2 * n)) / (1 + NARROW**2 / n)
    half = NARROW / (1 + NARROW**2 / n) * math.sqrt(share * (1 - share) / n + NARROW**2 / (4 * n * n))
    return (middle - half if share else 0.0), (middle + half if share < 1 else 1.0)


def _chernoff(share: float, n: float) -> float:
    """Return the largest p for which ``n`` · KL(share, p) is at most -ln of the tail."""
    most = -math.log(math.erfc(WIDE / math.sqrt(2)) / 2) / n
    low, high = share, 1.0
    for _ in range(60):
        p = (low + high) / 2
        parts = ((share, p), (1 - share, 1 - p))
        divergence = math.fsum(q * math.log(q / r) if r else math.inf for q, r in parts if q)
        low, high = (p, high) if divergence <= most else (low, p)
    return low


def without_one_client(
    window: Sequence[Request], found: list[Judged], budget: Mapping[str, float], *, logits: bool
) -> list[Judged]:
    """Return ``found`` with 1 as the lower ends of a breach that shows in no requests but one client's.

    A client with over nine tenths of the rows counts by itself.
    """
    if all(each.low <= 1 for each in found):
        return found
    total, excused = math.fsum(each.total for each in window), set[str]()
    for client in {each.client for each in window}:
        others = [each for each in window if each.client != client]
        if others and math.fsum(each.total for each in others) >= 0.1 * total:
            excused |= {each.bound for each in judge(others, budget, logits=logits) if each.ratio <= 1}
    return [
        replace(each, low=min(each.low, 1.0), lowest=min(each.lowest, 1.0)) if each.bound in excused else each
        for each in found
    ]


# --- the change detector ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Usual:
    """The expected log drift: its centre, its spread, and θ."""

    centre: float
    spread: float
    root: float


@cache
def usual(rows: tuple[float, ...], outputs: int) -> Usual | None:
    logs = [math.log(max(row, NOISE)) for row in rows]
    n = len(logs)
    if n < 16:
        return None
    mean = math.fsum(logs) / n
    part = 2 / (9 * (n - 1))  # Wilson and Hilferty's quantile of a chi-squared distribution
    of_chance = (1 - part - 1.6448536269514722 * math.sqrt(part)) ** 3
    spread = max(0.05, math.sqrt(math.fsum((each - mean) ** 2 for each in logs) / (n - 1) / of_chance))
    centre = mean + 2 * spread / math.sqrt(n)
    most = math.log(TEN_WEEKS * outputs) / SOONEST / (math.log(2) - ALLOWANCE)
    grid = [at / 40 for at in range(-360, 361)]
    bell = [math.exp(-at * at / 2) for at in grid]
    tukey = [(width * spread * at, share * p / math.fsum(bell)) for share, width in ((0.9, 1), (0.1, 3))
             for at, p in zip(grid, bell, strict=True)]  # fmt: skip
    return Usual(centre, spread, min(_root(tukey, most), _root([(each - centre, 1 / n) for each in logs], most)))


def _root(steps: list[tuple[float, float]], most: float) -> float:
    """Return the θ, at most ``most``, with E[exp(θ g)] = 1."""
    clipped = [(min(max(step, -CLIP), CLIP) - ALLOWANCE, share) for step, share in steps]
    low, high = 0.0, 2 * most
    for _ in range(50):
        root = (low + high) / 2
        over = math.fsum(share * math.exp(root * step) for step, share in clipped) > 1
        low, high = (low, root) if over else (root, high)
    return min(low, most)


# --- one output -------------------------------------------------------------------------------------------------------


@dataclass
class Output:
    """Recent drift of one output of a model of ``outputs`` outputs, and what follows from it."""

    budget: Mapping[str, float]
    outputs: int
    logits: bool
    expected: Usual | None
    learnt: list[float] = field(default_factory=list)
    changes: int = 0  # alarms, ever

    def __post_init__(self) -> None:
        self.restart()

    def restart(self) -> None:
        """Forget all but the expected drift, or what is learnt of it."""
        self.recent, self.apart = list[Request](), list[Request]()
        self.score, self.alarm = 0.0, False
        self.since_zero = self.since_top = 0  # requests
        self.found, self.over, self.cause, self.size = list[Judged](), set[str](), "none", 0.0
        self.apart_is_over = False

    def add_apart(self, request: Request) -> None:
        self.apart = _older(self.apart, request)
        found = judge(self.apart, self.budget, logits=self.logits)
        self.apart_is_over = any(each.lowest > 1 for each in found)

    def add(self, request: Request) -> None:
        self.recent = _older(self.recent, request)
        self._detect([row.relative_l2 for row in request.rows])
        found = judge(self.recent, self.budget, logits=self.logits)
        self.found = without_one_client(self.recent, found, self.budget, logits=self.logits)
        self.over = {each.bound for each in self.found if each.lowest > 1 or (each.low > 1 and each.bound in self.over)}
        self.cause = self._cause() if self.over or self.alarm else "none"
        self.size = size_of(self.recent)

    def _detect(self, drifts: list[float]) -> None:
        if self.expected is None:
            if all(each <= self.budget.get("relative_l2", 1e300) for each in drifts):
                self.learnt += drifts
            if len(self.learnt) >= LEARN:
                self.expected = usual(tuple(self.learnt), self.outputs)
            return
        threshold = math.log(TEN_WEEKS * self.outputs)
        logs = [math.log(max(each, NOISE)) - self.expected.centre for each in drifts]
        mean = math.fsum(min(max(each, -CLIP), CLIP) for each in logs) / len(logs)
        step = self.expected.root * (mean - ALLOWANCE) / threshold
        self.score = min(max(0.0, self.score + min(step, 1 / SOONEST)), 1.0)
        is_top, before = self.score > 1 - 1e-9, self.alarm
        self.since_zero = self.since_zero + 1 if self.score else 0
        self.since_top = 0 if is_top else self.since_top + 1
        self.alarm = is_top or (before and self.score > 0)
        if self.alarm and not before:
            self.changes += 1
            self.recent = self.recent[-max(self.since_zero, self._fewest()) :]
        elif before and not self.alarm:
            self.recent = self.recent[-self.since_top :]

    def _fewest(self) -> int:
        """Return how many of the newest requests can establish a breach."""
        enough = (count for count in range(1, len(self.recent)) if size_of(self.recent[-count:]) >= FEWEST)
        return next(enough, len(self.recent))

    def _cause(self) -> str:
        rows = [(row, each.weight) for each in self.recent for row in each.rows]
        if any(row.nonfinite for row, _ in rows):
            return "broken"
        centre, spread = (self.expected.centre, self.expected.spread) if self.expected else (math.log(0.3), 0.0)
        twice, fourfold = (math.log(2), math.log(4)) if self.expected else (0.0, 0.0)
        logs = sorted((math.log(max(row.relative_l2, NOISE)) - centre, weight) for row, weight in rows)
        bad = [(each, weight) for each, weight in logs if each > max(twice, 2 * spread)]
        below, half = 0.0, math.fsum(weight for _, weight in bad) / 2
        for each, weight in bad:
            below += weight
            if below >= half * (1 - 1e-9):
                return "broken" if each >= max(fourfold, 4 * spread) else "rounding"
        return "rounding"


def _older(window: Sequence[Request], newest: Request) -> list[Request]:
    faded = 2 ** (-1 / HALF_LIFE)
    return [*(Request(rows, weight * faded, client) for rows, weight, client in window), newest]
