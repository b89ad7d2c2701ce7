"""``bf16-convert recover``: the options of ``checkpoint``, and those of training."""

from __future__ import annotations

import sys
from typing import Any

import click

from converter.commands.checkpoint import checkpoint, options_of
from converter.commands.common import say
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
    help="Yields batches: a mapping of an array per input, or (inputs, labels). Called again for each pass.",
)
@click.option(
    "--eval",
    "evaluation",
    metavar="PKG.MOD:LOADER",
    help="Yields the batches that recovery is judged on.  [default: those of --data]",
)
@click.option("--steps", type=int, required=True, help="Batches to train on.")
@click.option(
    "--precision",
    type=click.Choice(PRECISIONS),
    default="bf16-mixed",
    show_default=True,
    help="What products compute in while training; with -mixed, weights keep an fp32 copy.",
)
@click.option(
    "--loss-scaling",
    metavar="none|static=K|dynamic",
    help="What the loss of 16-mixed is multiplied by; bf16 needs none.  [default: dynamic for 16-mixed, else none]",
)
@click.option(
    "--loss",
    type=click.Choice(LOSSES),
    default="distillation",
    show_default=True,
    help="The distance from the fp32 answers, or from the labels that --data gives.",
)
@click.option(
    "--learning-rate",
    type=float,
    default=1e-3,
    show_default=True,
    help="The largest step, as a share of each tensor's root mean square.",
)
@click.option("--device", metavar="auto|cpu|cuda:N", default="auto", show_default=True, help="What trains.")
@click.option(
    "--checkpoint-every",
    "every",
    type=click.IntRange(min=1),
    metavar="STEPS",
    help="Steps from one checkpoint to the next.  [default: a tenth of --steps]",
)
@click.option("--resume", is_flag=True, help="Go on from the last checkpoint of a recovery that was interrupted.")
def recover(debug: bool, **given: Any) -> None:
    """Train the weights of SOURCE until bf16 answers as fp32 did, and convert them.

    A short fine-tune with weights rounded as the artifact rounds them. Without labels it learns the answers of the fp32
    model itself. Nothing is published unless the bf16 artifact keeps to the budget, from what the ORIGINAL weights
    answer in fp32. Needs Lightning: pip install 'bf16kit[lightning]'. docs/recovering.md says what each number means.
    """
    from bf16kit.runtime import kernel
    from converter.process import memory, progress
    from converter.recovery.settings import parse_settings
    from converter.recovery.walk import recover as run
    from converter.report import page, recovery

    kernel.chosen()
    memory.map_large_blocks()
    settings = parse_settings({name: given.pop(name) for name in _OWN})
    options = options_of(**given, search=False, search_minutes=1.0)
    with progress.on(sys.stderr) as bar:
        result = run(options, settings, bar)
    say(page.summary(result.artifact, result.notes))
    found = result.artifact.measurements()
    if found is not None and found.recovery is not None:
        say("\n" + recovery.text(found.recovery))
