"""``bf16-convert checkpoint``: its options, parsed before any long work begins."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from converter.commands.common import PATH, debug_option, say

if TYPE_CHECKING:
    from converter.options import Options

_VERSION = re.compile("[1-9][0-9]*")


@click.command()
@click.argument("source", type=PATH)
@click.option(
    "--out",
    required=True,
    type=PATH,
    metavar="REPOSITORY/MODEL/VERSION",
    help="Where the artifact goes; for a directory of checkpoints, REPOSITORY.",
)
@click.option("--force", is_flag=True, help="Replace an artifact that is there already.")
@click.option(
    "--per-model",
    type=PATH,
    metavar="DIRECTORY",
    help="Options of single checkpoints of many: NAME.yaml for each, keys as here without the dashes.",
)
@click.option(
    "--jobs",
    type=click.IntRange(min=1),
    help="Of many checkpoints, how many at a time.  [default: 1; with --ray one for each node]",
)
@click.option(
    "--ray",
    metavar="ADDRESS",
    help="Convert many on the nodes of a Ray cluster (auto, HOST:PORT), which share this file system.",
)
@click.option("--model", metavar="PKG.MOD:FACTORY", help="What builds the module, for bare weights; or an ONNX graph.")
@click.option(
    "--map",
    type=PATH,
    metavar="RULES.YAML",
    help="Which of the model's tensors each of the checkpoint's fills, and how it is turned.",
)
@click.option("--accept-map", is_flag=True, help="Use the map that is proposed for a JAX checkpoint, unconfirmed.")
@click.option("--step", type=click.IntRange(min=0), help="Of a directory of Orbax steps.  [default: the newest]")
@click.option("--item", metavar="NAME", help="Of an Orbax step that holds several.")
@click.option("--model-args", metavar="JSON", help="Keyword arguments of the factory; they win over a file's own.")
@click.option(
    "--weights",
    metavar="ema|model|PREFIX",
    help="Of a Lightning checkpoint: averaged weights, trained ones, or those behind a prefix.  [default: what"
    " Lightning would load]",
)
@click.option(
    "--input",
    "inputs",
    multiple=True,
    metavar="NAME:DTYPE:DIMS",
    help="An input, e.g. input_ids:int64:batch,seq; dims are sizes or names.",
)
@click.option(
    "--output",
    "outputs",
    multiple=True,
    metavar="NAME:KIND",
    help="What an output is: logits, embedding, regression or other.  [default: judged by its name]",
)
@click.option(
    "--samples",
    metavar="FILE|DIR|PKG.MOD:FN",
    help="Calibration inputs: a .npz or .safetensors file is one feed, a directory many, a function yields them."
    "  [default: seeded random ones]",
)
@click.option(
    "--format",
    "formats",
    multiple=True,
    type=click.Choice(["onnx", "torchscript", "pt2", "safetensors", "hf"]),
    help="May be given more than once: onnx, torchscript and pt2 (torch.export) are served; safetensors, a bf16"
    " checkpoint, and hf, a Hugging Face directory of it, are for other programs.  [default: onnx, and torchscript"
    " where the source allows]",
)
@click.option(
    "--profile",
    "profiles",
    multiple=True,
    type=click.Choice(["cpu", "cpu-bf16", "cuda"]),
    help="ONNX profiles to write; may be given more than once.  [default: cpu and cuda, and cpu-bf16 where it keeps to"
    " the budget]",
)
@click.option("--signature", metavar="NAME", help="The signature of a TensorFlow model.  [default: serving_default]")
@click.option("--with-past", is_flag=True, help="A causal language model's cache becomes inputs and outputs.")
@click.option("--keep-fp32", multiple=True, metavar="REGEX", help="Nodes or tensors that stay fp32.")
@click.option("--bf16", multiple=True, metavar="REGEX", help="Nodes or tensors that become bf16.")
@click.option(
    "--budget",
    multiple=True,
    metavar="METRIC=NUMBER",
    help="A bound on drift, e.g. relative_l2=1e-2, or on a quantile: relative_l2.p99=2e-2.",
)
@click.option("--allow-over-budget", is_flag=True, help="Publish all the same when drift is over budget.")
@click.option(
    "--search/--no-search", default=True, help="Over budget, search for the fewest fp32 islands that meet it."
)
@click.option(
    "--search-minutes",
    type=click.FloatRange(min=0, min_open=True),
    default=5.0,
    show_default=True,
    help="The longest the search may take.",
)
@click.option("--drop-failing-profiles", is_flag=True, help="Publish without the profiles that are over budget.")
@click.option(
    "--subnormals",
    type=click.Choice(["keep", "flush"]),
    default="keep",
    show_default=True,
    help="What becomes of weights below the smallest normal number.",
)
@click.option("--saturate", is_flag=True, help="Weights that overflow become the largest bf16 number.")
@click.option("--residual/--no-residual", default=True, help="Keep the low 16 bits, which restore fp32.")
@click.option("--report/--no-report", default=True, help="Write report.html.")
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True, help="Of the random samples.")
@click.option("--trust-pickle", is_flag=True, help="Load pickles, which can run any code, of people you trust.")
@debug_option
@click.pass_context
def checkpoint(
    context: click.Context, /, debug: bool, per_model: Path | None, jobs: int | None, ray: str | None, **given: object
) -> None:
    """Convert SOURCE: a Hugging Face directory, safetensors, torch, Lightning, JAX, TensorFlow, Keras or ONNX.

    With a directory of them and --out REPOSITORY, convert each that is not converted yet; the exit code is the worst.
    """
    source, out = given["source"], given["out"]
    assert isinstance(source, Path)  # noqa: S101 - click's `type=PATH`
    assert isinstance(out, Path)  # noqa: S101
    if _is_collection(source, out):
        from converter.commands.collection import convert_all

        context.exit(convert_all(context, source, out, _check))
    _refuse_one_without_version(source, out)
    if (per_model, jobs, ray) != (None, None, None):
        raise click.UsageError(
            f"--per-model, --jobs and --ray are for a directory of checkpoints, and {source} is none"
        )

    from bf16kit.runtime import kernel
    from converter.pipeline import convert
    from converter.process import memory, progress
    from converter.report import page
    from converter.sources.mapping.choice import UnconfirmedMap

    kernel.chosen()  # reports a wrong BF16KIT_KERNELPATH now, not when all is written and the first graph runs
    memory.map_large_blocks()
    memory.keep_few_primitives()

    options = options_of(**given)
    try:
        with progress.on(sys.stderr) as bar:
            result = convert(options, bar)
    except UnconfirmedMap as unconfirmed:
        say(unconfirmed.rules)
        raise
    say(page.summary(result.artifact, result.notes))


def _is_collection(source: Path, out: Path) -> bool:
    """Whether there are many checkpoints: a directory that is no model, and a repository to put models into."""
    if _VERSION.fullmatch(out.name) or not source.is_dir():
        return False
    from converter.bulk.worklist import is_collection

    return is_collection(source)


def _refuse_one_without_version(source: Path, out: Path) -> None:
    """Reject ``out`` if it would do only for many checkpoints; say why the directory is taken for one source."""
    if _VERSION.fullmatch(out.name) or not source.is_dir():
        return
    from bf16kit.errors import UsageError
    from converter.bulk.mistaken import taken_for

    raise UsageError(
        f"--out {out}: must end in MODEL/VERSION, the version 1 or more; it ends in {out.absolute().name!r}, which"
        f" would do for a directory of many checkpoints, and {taken_for(source)}"
    )


def _check(arguments: Sequence[str]) -> None:
    """Check the command line of one of many checkpoints; raises as the command itself would."""
    parsed = dict(checkpoint.make_context("checkpoint", list(arguments)).params)
    for name in ("debug", "per_model", "jobs", "ray"):
        parsed.pop(name)
    options_of(**parsed)


def options_of(**given: object) -> Options:
    """Return the parsed options; a mistake in any of them is reported before long work begins."""
    from converter import options as parse

    def many(name: str) -> tuple[str, ...]:
        values = given.pop(name)
        assert isinstance(values, tuple)  # noqa: S101 - click's `multiple=True`
        return values

    from bf16kit.drift import Budget
    from bf16kit.errors import UsageError

    out, model_args, profiles = given.pop("out"), given.pop("model_args"), many("profiles")
    formats = many("formats")
    if profiles and formats and set(formats) <= {"safetensors", "hf"}:
        raise UsageError(f"--profile {profiles[0]}: is an ONNX graph; give --format onnx as well, or leave it out")
    assert isinstance(out, Path)  # noqa: S101 - click's `type=PATH`
    return parse.Options(
        target=parse.parse_target(out),
        model_args=parse.parse_model_args(str(model_args) if model_args is not None else None),
        inputs=parse.parse_inputs(many("inputs")),
        outputs=parse.parse_outputs(many("outputs")),
        formats=formats,  # type: ignore[arg-type]  # click.Choice checked them
        profiles=profiles or ("cpu", "cuda"),  # type: ignore[arg-type]
        optional=() if profiles else ("cpu-bf16",),
        keep_fp32=parse.parse_patterns("--keep-fp32", many("keep_fp32")),
        bf16=parse.parse_patterns("--bf16", many("bf16")),
        budget=Budget.parse(many("budget")),
        **given,  # type: ignore[arg-type]
    )
