"""``bf16-convert recover``: the options of ``checkpoint``, and those of training."""

from __future__ import annotations

import sys
from typing import Any

import click

from converter.commands.checkpoint import checkpoint, options_of
from converter.commands.common import echo
from converter.recovery.settings import LOSSES, PRECISIONS

# A search for islands is the alternative to a recovery, and a recovery converts one model only.
_LEFT_OUT = ("search", "search_minutes", "per_model", "jobs", "ray")
_OWN = (
    "data",
    "evaluation",
    "steps",
    "precision",
    "loss_scaling",
    "loss",
    "learning_rate",
    "device",
    "every",
    "resume",
)


@click.command(params=[option for option in checkpoint.params if option.name not in _LEFT_OUT])
@click.option(
    "--data",
    required=True,
    metavar="PKG.MOD:LOADER",
    help="Function that yields batches: a mapping with an array per input, or (inputs, labels). It is called once per"
    " pass.",
)
@click.option(
    "--eval",
    "evaluation",
    metavar="PKG.MOD:LOADER",
    help="Function that yields the batches on which the result is judged.  [default: those of --data]",
)
@click.option("--steps", type=int, required=True, help="Number of batches to train on.")
@click.option(
    "--precision",
    type=click.Choice(PRECISIONS),
    default="bf16-mixed",
    show_default=True,
    help="Precision of products in training; with -mixed, weights keep an fp32 copy.",
)
@click.option(
    "--loss-scaling",
    metavar="none|static=K|dynamic",
    help="Factor for the loss of 16-mixed, so that gradients do not underflow.  [default: dynamic for 16-mixed, else"
    " none]",
)
@click.option(
    "--loss",
    type=click.Choice(LOSSES),
    default="distillation",
    show_default=True,
    help="Train towards the outputs of the fp32 model (distillation), or the labels from --data (cross-entropy).",
)
@click.option(
    "--learning-rate",
    type=float,
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
def recover(debug: bool, **given: Any) -> None:
    """Train the weights of SOURCE briefly so that bf16 is within budget, and convert them.

    Training rounds the weights as the artifact does. Without labels, its target is the outputs of the fp32 model. The
    result is published only if the bf16 artifact is within budget of the fp32 outputs of the ORIGINAL weights. Needs
    Lightning: pip install 'bf16kit[lightning]'. docs/recovering.md explains the numbers.
    """
    from bf16kit.runtime.ort import kernel
    from converter.process import memory, progress
    from converter.recovery.settings import parse_settings
    from converter.recovery.steps import recover as run
    from converter.report import page, recovery

    kernel.configured_kernel()
    memory.map_large_blocks()
    settings = parse_settings({name: given.pop(name) for name in _OWN})
    options = options_of(**given, search=False, search_minutes=1.0)
    with progress.for_stream(sys.stderr) as bar:
        result = run(options, settings, bar)
    echo(page.summary(result.artifact, result.notes))
    found = result.artifact.measurements()
    if found is not None and found.recovery is not None:
        echo("\n" + recovery.text(found.recovery))
