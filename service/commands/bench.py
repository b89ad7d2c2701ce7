"""``bf16-serve bench``: measures a local model on this machine, and suggests settings for it."""

from __future__ import annotations

import math
import re
from contextlib import closing
from pathlib import Path

import click
import numpy as np

from bf16kit.messages.errors import ConfigError, InvalidRequest, UsageError
from bf16kit.messages.wording import quoted, table
from bf16kit.numerics.tensors import check_feeds
from bf16kit.runtime import available_cpus
from bf16kit.runtime.ort import kernel
from bf16kit.service.commands import output
from bf16kit.service.commands.check import model_directories
from bf16kit.service.commands.measuring import TURNS, Bench, Row
from bf16kit.service.config.logs import configure
from bf16kit.service.config.resources import bound_heap
from bf16kit.service.config.serverconfig import load_config
from bf16kit.service.contract import Array
from bf16kit.service.models.goldengate import golden_of
from bf16kit.service.models.loading import feeds_of
from bf16kit.service.models.opened import OpenedArtifact, open_artifact
from bf16kit.service.models.plan import desired_model_of
from bf16kit.service.models.serving import DEFAULT_MAX_BATCH_SIZE

_MOST_ROWS = 65_536  # the limit of serving.yaml
_STEADY = 1.5  # the fastest turn is at most this many times the slowest, unless other programs use the machine


@click.command()
@click.argument("model")
@output.repository
@output.config_file
@click.option("--device", help="auto, cpu, or cuda:N.  [default: the server's]")
@click.option(
    "--seconds",
    type=click.FloatRange(min=1, max=3600),
    default=30.0,
    show_default=True,
    help="About how long to measure, without loading; longer if single runs take longer.",
)
@click.option("--rows", metavar="N,N,…", help="Batch sizes to measure.  [default: 1, 2, 4, … max_batch_size]")
@click.option("--input", "shapes", multiple=True, metavar="NAME=SHAPE", help="Shape of an input: input_ids=1x128.")
@click.option("--target-ms", type=click.FloatRange(min=0, min_open=True), help="The p99 latency to keep within, in ms.")
@output.as_json
def bench(
    model: str, repository: str | None, file: Path | None, device: str | None, seconds: float, rows: str | None,
    shapes: tuple[str, ...], target_ms: float | None, as_json: bool,
) -> None:  # fmt: skip
    """Measure MODEL without a network, and suggest profile, instances and max_batch_size.

    1, 4, 16 and 64 clients, which wait for each answer, send single rows through the server's own batcher. Each table
    varies one setting and keeps the best; its settings run in turn. Exit codes: 0; 1 the model cannot be served;
    2 wrong usage; 130 Ctrl-C.
    """
    bound_heap()
    configure("error")
    with output.exit_on_errors("bench"):
        kernel.configured_kernel()
        config = load_config({"repository": repository, "device": device}, file)
        (directory,) = model_directories(config.repository, (model,))
        plan = desired_model_of(directory).plans[-1]
        if plan.broken:
            raise ConfigError(plan.broken)
        opened = open_artifact(plan.path, plan.serving)
        sizes = _sizes(rows, opened)
        feeds, origin = _feeds(opened, shapes)
        with closing(Bench(plan, config, feeds, math.inf if target_ms is None else target_ms / 1e3)) as measured:
            measured.run(sizes, seconds)
        best, now = (measured.best_row(setting) for setting in (measured.best, measured.now))
        suggested = best.setting._asdict()
        if plan.serving.profile != "auto" or len({row.setting.profile for row in measured.steps["profile"]}) == 1:
            del suggested["profile"]  # no other may serve
        if not sizes:
            del suggested["max_batch_size"]
        result = {
            "model": model,
            "model_version": plan.version,
            "device": measured.info.device,
            "cores": available_cpus(),
            "inputs": f"{', '.join(f'{name}{list(array.shape)}' for name, array in feeds.items())}: {origin}",
            "skipped": measured.skipped,
            "now": now.setting._asdict(),
            "suggested": suggested,
            "reason": _reason(best, now, target_ms),
            "steady": max(best.rates) <= _STEADY * min(best.rates),
        }
    if as_json:
        steps = {name: [_figures(row) for row in step] for name, step in measured.steps.items()}
        output.echo_json({"version": 2, **result, "steps": steps})
        return
    for name, step in measured.steps.items():
        figures = [[_short(value) for value in _figures(row).values()] for row in step]
        output.echo(table(f"Varied: {name}; medians of {TURNS} turns", list(_figures(best)), figures) + "\n")
    for name, value in result.items():
        output.echo(f"{name}: {_short(value)}")
    if not result["steady"]:
        output.echo("the turns differ widely: something else used the machine; measure again when it is idle")


def _figures(row: Row) -> dict[str, str | float]:
    percentiles = {"p50_ms": row.percentile(0.5) * 1e3, "p99_ms": row.p99 * 1e3}
    rates = {"rows_per_s": row.rate, "slowest": min(row.rates), "fastest": max(row.rates)}
    return {**row.setting._asdict(), "clients": row.clients, **percentiles, **rates}


def _short(value: object) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key}: {each}" for key, each in value.items())
    if isinstance(value, list):
        return "; ".join(value) or "none"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _reason(best: Row, now: Row, target_ms: float | None) -> str:
    figures = f"{best.rate:.4g} rows/s with {best.clients} clients, p99 {best.p99 * 1e3:.3g} ms"
    if target_ms is not None and best.p99 * 1e3 > target_ms:
        return f"no setting keeps p99 within {target_ms:g} ms: the nearest gave {figures}"
    if best.setting == now.setting:
        return f"the current setting gave {figures}, and no other 3 % more"
    return f"it gave {figures}; the current setting {now.rate:.4g} with {now.clients}"


def _sizes(text: str | None, opened: OpenedArtifact) -> list[int]:
    if opened.batch_axis is None:
        if text is not None:
            raise UsageError("this model has no batch axis; leave --rows out")
        return []
    if text is None:
        most = max(DEFAULT_MAX_BATCH_SIZE, opened.max_batch_size)
        return [1 << power for power in range(most.bit_length())]
    sizes = sorted({int(size) if re.fullmatch("[0-9]{1,5}", size) else 0 for size in text.split(",")})
    if sizes[0] < 1 or sizes[-1] > _MOST_ROWS:
        raise UsageError(f"--rows {quoted(text)}: expected sizes of 1 to {_MOST_ROWS} separated by commas, as 1,8,32")
    return sizes


def _feeds(opened: OpenedArtifact, shapes: tuple[str, ...]) -> tuple[dict[str, Array], str]:
    """Return one row of inputs, and where they come from: the golden samples, else zeros.

    An input with a shape in ``shapes`` gets that shape, filled with its values over and over. Raises UsageError for
    inputs that do not fit the model.
    """
    golden, axis = golden_of(opened.artifact), opened.batch_axis
    arrays = dict(feeds_of(opened, 1, golden))
    origin = "zeros" if golden is None else "the golden samples"
    for text in shapes:
        name, _, dims = text.rpartition("=")
        if not re.fullmatch(r"[1-9][0-9]*([x,][1-9][0-9]*)*", dims):
            raise UsageError(f"--input {quoted(text)}: expected NAME=SHAPE, for example input_ids=1x128")
        if name not in arrays:
            raise UsageError(f"--input {quoted(text)}: the inputs are {', '.join(arrays)}")
        arrays[name] = np.resize(arrays[name], tuple(map(int, re.split("[x,]", dims))))
    if shapes:
        origin += ", shaped by --input"
    try:
        check_feeds(opened.inputs, arrays)
    except InvalidRequest as error:
        raise UsageError(f"{origin}: {error}") from None
    if axis is not None:
        arrays = {name: np.ascontiguousarray(array.take([0], axis)) for name, array in arrays.items()}
    return arrays, origin
