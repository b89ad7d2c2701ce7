"""``bf16-convert recover``: the options of ``checkpoint``, and those of training."""

from __future__ import annotations

import sys
import time
from dataclasses import fields
from typing import Any

import click

from bf16kit.converter.commands import echo, echo_wrapped
from bf16kit.converter.commands.checkpoint import checkpoint
from bf16kit.converter.recovery import PRECISIONS, Settings, parse_scaling

# A search for islands is the alternative to a recovery, and a recovery converts one model only.
_LEFT_OUT = ("search", "search_minutes", "per_model", "jobs", "ray", "as_json", "dry_run")


@click.command(params=[option for option in checkpoint.params if option.name not in _LEFT_OUT])
@click.option(
    "--data",
    required=True,
    metavar="PKG.MOD:LOADER",
    help="Function that yields batches: a mapping with an array per input, or (inputs, labels). Called once per pass.",
)
@click.option(
    "--eval",
    "evaluation",
    metavar="PKG.MOD:LOADER",
    help="Function that yields the batches on which the result is judged.  [default: those of --data]",
)
@click.option("--steps", type=click.IntRange(min=1), required=True, help="Number of batches to train on.")
@click.option(
    "--precision",
    type=click.Choice(PRECISIONS),
    default="bf16-mixed",
    show_default=True,
    help="Precision of products in training; with -mixed, weights keep an fp32 copy.",
)
@click.option(
    "--loss-scaling",
    metavar="none|static=K|dynamic[=N]",
    help="Factor for the loss of 16-mixed, so that gradients do not underflow; dynamic=N doubles it after N finite"
    " steps in a row.  [default: dynamic for 16-mixed]",
)
@click.option(
    "--learning-rate",
    type=click.FloatRange(0, 1, min_open=True, max_open=True),
    default=1e-3,
    show_default=True,
    help="Largest step, as a share of each tensor's root mean square.",
)
@click.option("--device", metavar="auto|cpu|cuda:N", default="auto", show_default=True, help="Device to train on.")
@click.option(
    "--checkpoint-every",
    "every",
    type=click.IntRange(min=1),
    metavar="STEPS",
    help="Steps from one checkpoint to the next.  [default: a tenth of --steps]",
)
@click.option("--resume", is_flag=True, help="Continue an interrupted recovery from its last checkpoint.")
def recover(**given: Any) -> None:
    """Train the weights of SOURCE briefly so that bf16 is within budget, and convert them.

    Training rounds the weights as the artifact does. It needs no labels: its target is the outputs of the fp32 model.
    The result is published only if the bf16 artifact is within budget of the fp32 outputs of the ORIGINAL weights.
    docs/recovering.md explains the numbers.
    """
    from bf16kit.converter.keywords import NAMES, options_of
    from bf16kit.converter.process import memory, progress
    from bf16kit.converter.recovery.steps import recover as run
    from bf16kit.converter.report.closing import closing
    from bf16kit.converter.report.inspect import recovery_text
    from bf16kit.runtime.ort import kernel

    kernel.configured_kernel()
    memory.map_large_blocks()
    given["loss_scaling"] = parse_scaling(given["loss_scaling"], given["precision"])
    given["every"] = given["every"] or max(1, given["steps"] // 10)
    settings = Settings(**{field.name: given.pop(field.name) for field in fields(Settings)})
    began = time.monotonic()
    kept = {name: given[name] for name in NAMES if name in given}
    options = options_of(given["source"], given["out"], {**kept, "search": False, "search_minutes": 1.0})
    with progress.for_stream(sys.stderr) as bar:
        result = run(options, settings, bar)
    echo_wrapped(closing(result.artifact, result.notes, time.monotonic() - began, verbose=given["verbose"]))
    found = result.artifact.measurements()
    if found is not None and found.recovery is not None:
        echo("\n" + recovery_text(found.recovery))
