"""The options of `bf16-serve bench` and its results, as text, as JSON, and as settings."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bf16kit.messages.errors import UsageError
from bf16kit.messages.wording import quoted, table
from bf16kit.runtime import available_cpus
from service.commands.advice import Advice, Candidate, Measurement, advise
from service.commands.inputs import Inputs
from service.commands.interleaved import ROUNDS, Cell
from service.commands.layouts import Layout
from service.commands.servingfile import update
from service.config.serverconfig import ServerConfig
from service.models.loading import LoadedModel
from service.models.plan import Plan
from service.models.serving import FILE_NAME

VERSION = 1  # of the format of `bench --json`
_STEADY = 1.5  # the fastest turn is at most this many times the slowest, unless other programs use the machine
_MOST_ROWS = 65_536  # the limit of serving.yaml


@dataclass(frozen=True, slots=True)
class Options:
    """The command's options. Without ``rows``, the powers of two up to the model's largest batch are measured."""

    model: str
    config: ServerConfig
    version: int | None
    seconds: float
    rows: tuple[int, ...]
    request_rows: int
    shapes: tuple[str, ...]
    samples: Path | None
    target: float | None  # seconds
    write: bool

    @classmethod
    def parse(
        cls,
        model: str,
        config: ServerConfig,
        *,
        version: int | None,
        seconds: float,
        rows: str | None,
        request_rows: int,
        shapes: tuple[str, ...],
        samples: Path | None,
        target_ms: float | None,
        write: bool,
    ) -> Options:
        """Return the options. Raises UsageError for ``rows`` that are not batch sizes."""
        target = None if target_ms is None else target_ms / 1e3
        sizes = () if rows is None else _sizes(rows)
        return cls(model, config, version, seconds, sizes, request_rows, shapes, samples, target, write)


@dataclass(slots=True)
class BenchResult:
    """The measurements of all tables, and the advice that follows from them."""

    options: Options
    plan: Plan
    loaded: LoadedModel
    inputs: Inputs
    alone: dict[tuple[str, int], Cell] = field(default_factory=dict)  # by profile and rows
    bare: dict[tuple[Layout, int], Cell] = field(default_factory=dict)  # by layout and rows
    served: dict[tuple[Layout, int, int], Cell] = field(default_factory=dict)  # by layout, max_batch_size and clients
    current: tuple[Layout, int] | None = None  # the current settings
    skipped: list[str] = field(default_factory=list)  # profiles that were not measured, and why

    def write(self) -> str:
        """Write the advice into serving.yaml; return the difference, "" if there is none. Raises ConfigError."""
        return update(self.file, self.changes())

    @property
    def file(self) -> Path:
        return self.plan.path.parent / FILE_NAME

    @property
    def advice(self) -> Advice:
        found: dict[tuple[Layout, int], list[Measurement]] = {}
        for (layout, rows, clients), cell in self.served.items():
            found.setdefault((layout, rows), []).append(Measurement(clients, cell.rate, cell.percentile(0.99)))
        return advise(
            [Candidate(*key, tuple(measurements)) for key, measurements in found.items()], self.options.target
        )

    def changes(self) -> dict[str, int]:
        """Return the advice as keys of serving.yaml."""
        advice = self.advice
        keys = {"max_batch_size": advice.max_rows} if self.batches else {}
        return {**keys, "instances": advice.layout.instances}

    @property
    def steady(self) -> bool:
        """Whether the turns behind the advice have similar rates, as they have on an otherwise idle machine."""
        advice = self.advice
        low, high = self.served[advice.layout, advice.max_rows, advice.at.clients].spread
        return high <= _STEADY * low

    @property
    def batches(self) -> bool:
        return self.loaded.opened.batch_axis is not None

    def record(self) -> dict[str, Any]:
        """Return everything as JSON values, see docs/json.md."""
        return {
            "version": VERSION,
            "model": self.options.model,
            "model_version": self.plan.version,
            "device": self.loaded.info.device,
            "profile": self.loaded.info.profile,
            "choice": self.loaded.info.choice,
            "cores": available_cpus(),
            "inputs": {"origin": self.inputs.origin, "shapes": self.inputs.shapes},
            "passed_over": self.skipped,
            "alone": [{"profile": name, "rows": rows} | _figures(c) for (name, rows), c in self.alone.items()],
            "bare": [_layout(layout) | {"rows": rows} | _figures(c) for (layout, rows), c in self.bare.items()],
            "served": [
                _layout(layout) | {"max_batch_size": rows, "clients": clients} | _figures(cell)
                for (layout, rows, clients), cell in self.served.items()
            ],
            "now": None if self.current is None else _layout(self.current[0]) | {"max_batch_size": self.current[1]},
            "suggested": self.changes(),
            "reason": self.advice.reason,
            "steady": self.steady,
        }


def text(measured: BenchResult) -> str:
    """Return the three tables, and the advice below them."""
    info, advice = measured.loaded.info, measured.advice
    label = f"model {measured.options.model!r} version {measured.plan.version}"
    shapes = ", ".join(f"{name}{shape}" for name, shape in measured.inputs.shapes.items())
    now = "" if measured.current is None else _setting(measured, *measured.current)
    rows = measured.options.request_rows
    return "\n".join(
        [
            f"{label} on {info.device}, {available_cpus()} cores; rows of {shapes}, {measured.inputs.origin}",
            *([info.choice] if info.choice else []),
            *measured.skipped,
            "",
            table("The runtime alone, one run at a time", ("profile", "rows", *_CELL), _alone(measured)),
            "",
            table(f"{_LAYOUT} on {info.profile}, as many runs at once", ("layout", "rows", *_CELL), _bare(measured)),
            "",
            table(
                f"{_LAYOUT} through the batcher, for clients that wait for each answer; rows of a request: {rows}",
                ("layout", "max_batch_size", "clients", *_CELL),
                _served(measured),
            ),
            "",
            f"rates are medians of {ROUNDS} turns, with the slowest and the fastest turn; current setting: {now}",
            f"suggested: {', '.join(f'{key}: {value}' for key, value in measured.changes().items())}",
            f"because {advice.reason}",
            *_fastest_profile(measured),
            *([] if measured.steady else [_UNSTEADY]),
        ]
    )


_LAYOUT = "Instances × threads"
_UNSTEADY = "the turns differ widely: something else used the machine; measure again when it is idle"
_CELL = ("p50 ms", "p99 ms", "rows/s", "turns")


def _cell(cell: Cell) -> tuple[object, ...]:
    low, high = cell.spread
    return cell.percentile(0.5) * 1e3, cell.percentile(0.99) * 1e3, f"{cell.rate:.4g}", f"{low:.4g}…{high:.4g}"


def _alone(measured: BenchResult) -> Iterator[tuple[object, ...]]:
    return ((profile, rows, *_cell(cell)) for (profile, rows), cell in measured.alone.items())


def _fastest_profile(measured: BenchResult) -> list[str]:
    """Return a line that names the profile with the most rows per second alone, if several were measured."""
    best: dict[str, float] = {}
    for (profile, _), cell in measured.alone.items():
        best[profile] = max(cell.rate, best.get(profile, 0.0))
    if len(best) == 1:
        return []
    fastest = max(best, key=lambda name: best[name])
    rates = ", ".join(f"{name} {rate:.4g}" for name, rate in best.items())
    return [f"fastest profile alone: {fastest} (most rows/s: {rates}); profile: {fastest} in serving.yaml serves it"]


def _bare(measured: BenchResult) -> Iterator[tuple[object, ...]]:
    return ((layout, rows, *_cell(cell)) for (layout, rows), cell in measured.bare.items())


def _served(measured: BenchResult) -> Iterator[tuple[object, ...]]:
    return ((layout, rows, clients, *_cell(cell)) for (layout, rows, clients), cell in measured.served.items())


def _setting(measured: BenchResult, layout: Layout, max_rows: int) -> str:
    return f"{layout.description()}, max_batch_size {max_rows}" if measured.batches else layout.description()


def _layout(layout: Layout) -> dict[str, int | None]:
    return {"instances": layout.instances, "threads": layout.threads or None}


def _figures(cell: Cell) -> dict[str, Any]:
    low, high = cell.spread
    return {
        "p50_ms": cell.percentile(0.5) * 1e3,
        "p99_ms": cell.percentile(0.99) * 1e3,
        "rows_per_s": cell.rate,
        "slowest": low,
        "fastest": high,
        "calls": sum(len(turn.latencies) for turn in cell.turns),
    }


def _sizes(text: str) -> tuple[int, ...]:
    try:
        sizes = tuple(sorted({int(size) for size in text.split(",")}))
    except ValueError:
        sizes = ()
    if not sizes or sizes[0] < 1 or sizes[-1] > _MOST_ROWS:
        raise UsageError(f"--rows {quoted(text)}: expected sizes of 1 to {_MOST_ROWS} separated by commas, as 1,8,32")
    return sizes
