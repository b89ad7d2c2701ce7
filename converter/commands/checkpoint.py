"""``bf16-convert checkpoint``: its options, parsed before any long work begins."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import click

from bf16kit.converter.commands import PATH, debug_option, echo, echo_wrapped, json_option

_VERSION = re.compile("[1-9][0-9]*")
_OF_COLLECTION = ("per_model", "jobs", "ray")


@click.command()
@click.argument("source", type=PATH)
@click.option(
    "--out", required=True, type=PATH, metavar="REPOSITORY/MODEL/VERSION", help="Directory of the new artifact."
)
@click.option("--force", is_flag=True, help="Replace an existing artifact.")
@click.option(
    "--per-model",
    type=click.Path(path_type=Path, exists=True, file_okay=False),
    metavar="DIRECTORY",
    help="Options for single checkpoints of a directory: NAME.yaml each; keys are option names without dashes.",
)
@click.option(
    "--jobs",
    type=click.IntRange(min=1),
    help="How many checkpoints of a directory to convert at a time.  [default: 1; with --ray, one per node]",
)
@click.option(
    "--ray",
    metavar="ADDRESS",
    help="Convert a directory on the nodes of a Ray cluster (auto, HOST:PORT); all nodes must share this file system.",
)
@click.option(
    "--model",
    metavar="PKG.MOD:FACTORY",
    help="Function or class that builds the torch module, if SOURCE has only weights; or an ONNX graph.",
)
@click.option(
    "--map",
    type=PATH,
    metavar="RULES.YAML",
    help="Rules that map checkpoint tensors to model tensors, with their transposes.",
)
@click.option(
    "--step",
    type=click.IntRange(min=0),
    help="The step to convert, of a directory of Orbax steps.  [default: the newest]",
)
@click.option("--item", metavar="NAME", help="The item to convert, of an Orbax step with several items.")
@click.option(
    "--model-args",
    metavar="JSON",
    help="Keyword arguments of the factory; they override the hyper-parameters in the checkpoint.",
)
@click.option(
    "--weights",
    metavar="PREFIX|KEY",
    help="Weights to take from a checkpoint: those whose names start with PREFIX, or those under KEY of a Lightning"
    " checkpoint.  [default: what Lightning would load, behind the prefix that fits the model]",
)
@click.option(
    "--input",
    multiple=True,
    metavar="NAME:DTYPE:DIMS",
    help="An input, e.g. input_ids:int64:batch,seq; dims are sizes or names.",
)
@click.option(
    "--output",
    multiple=True,
    metavar="NAME:KIND",
    help="The kind of an output: logits, embedding, regression or other.  [default: guessed from its name]",
)
@click.option(
    "--samples",
    metavar="FILE|DIR|PKG.MOD:FN",
    help="Calibration inputs: a .npz or .safetensors file with an array per input, whose rows are samples; a directory"
    " of such files, or a function that yields such dicts.  [default: random, from --seed]",
)
@click.option(
    "--format",
    multiple=True,
    type=click.Choice(["onnx", "torchscript", "pt2", "safetensors", "hf"]),
    help="A format to write; may be given more than once. bf16-serve runs onnx, torchscript and pt2 (torch.export)."
    " Other programs load safetensors (a bf16 checkpoint) and hf (a Hugging Face directory).  [default: onnx;"
    " torchscript if no ONNX graph can be made of the source]",
)
@click.option(
    "--profile",
    multiple=True,
    type=click.Choice(["cpu", "cpu-bf16", "cuda"]),
    help="An ONNX profile to write; may be given more than once.  [default: cpu and cuda, and cpu-bf16 if it is"
    " within budget]",
)
@click.option(
    "--signature", metavar="NAME", help="The signature of a TensorFlow model to convert.  [default: serving_default]"
)
@click.option("--with-past", is_flag=True, help="Make the cache of a causal language model inputs and outputs.")
@click.option(
    "--keep-fp32",
    multiple=True,
    metavar="REGEX",
    help="Keep nodes and tensors with matching names in fp32; may be given more than once.",
)
@click.option(
    "--bf16",
    multiple=True,
    metavar="REGEX",
    help="Make nodes and tensors with matching names bf16; may be given more than once.",
)
@click.option(
    "--budget",
    multiple=True,
    metavar="METRIC=NUMBER",
    help="A bound on drift, e.g. relative_l2=1e-2, or on a quantile: relative_l2.p99=2e-2.",
)
@click.option("--allow-over-budget", is_flag=True, help="Publish even if drift is over budget.")
@click.option(
    "--search/--no-search",
    default=True,
    help="If drift is over budget, search for the fewest nodes and weights to keep in fp32 (islands).",
)
@click.option(
    "--search-minutes",
    type=click.FloatRange(min=0, min_open=True),
    default=5.0,
    show_default=True,
    help="Limit of the search in minutes of processor time (all cores), without writing what it found.",
)
@click.option("--drop-failing-profiles", is_flag=True, help="Publish without the profiles that are over budget.")
@click.option(
    "--subnormals",
    type=click.Choice(["keep", "flush"]),
    default="keep",
    show_default=True,
    help="Keep weights below the smallest normal number, or set them to zero.",
)
@click.option("--saturate", is_flag=True, help="Replace weights that overflow bf16 with the largest bf16 number.")
@click.option(
    "--residual/--no-residual",
    default=True,
    help="Store the low 16 bits of each weight, so that `restore` can give back the fp32 checkpoint.",
)
@click.option("--report/--no-report", default=True, help="Write report.html.")
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True, help="Seed of the random samples.")
@click.option(
    "--trust-code",
    "--trust-pickle",
    "trust_code",
    is_flag=True,
    help="Load a source that is a program (a pickle, TorchScript, .pt2, a SavedModel, a Keras file with a Lambda"
    " layer); whoever wrote it decides what runs.",
)
@click.option(
    "-v", "--verbose", is_flag=True, help="Also print every measured row of drift, and the parts of the size."
)
@click.option(
    "--dry-run",
    is_flag=True,
    help="Read and plan only: print what would be bf16, estimated sizes and time. Nothing is run or written.",
)
@json_option
@debug_option
@click.pass_context
def checkpoint(context: click.Context, /, **given: Any) -> None:
    """Convert SOURCE: a Hugging Face directory, safetensors, torch, Lightning, JAX, TensorFlow, Keras or ONNX.

    If SOURCE is a directory of checkpoints and --out only a REPOSITORY, convert those that are not converted yet. The
    exit code is then the largest of all conversions.
    """
    source: Path = given["source"]
    if _is_collection(source, given["out"]):
        from bf16kit.converter.commands.collection import convert_collection

        if given["as_json"] or given["dry_run"]:
            raise click.UsageError(f"--json and --dry-run are for one checkpoint, and {source} is a directory of many")
        context.exit(convert_collection(context, source, given["out"]))
    if any(given[name] is not None for name in _OF_COLLECTION):
        raise click.UsageError(
            f"--per-model, --jobs and --ray are only for a directory of checkpoints, and {source} is not one;"
            " leave them out"
        )

    import bf16kit
    from bf16kit.converter.keywords import NAMES, options_of
    from bf16kit.converter.preview import preview
    from bf16kit.converter.process import memory, progress
    from bf16kit.converter.read.mapping import MapNeeded
    from bf16kit.converter.report.closing import VERSION, closing, record
    from bf16kit.messages.errors import Bf16kitError
    from bf16kit.messages.wording import dumps

    memory.map_large_blocks()
    memory.keep_few_primitives()

    options: Any = {name: given[name] for name in NAMES}
    as_json = given["as_json"]
    try:
        if given["dry_run"]:
            with progress.for_stream(sys.stderr) as bar:
                seen = preview(options_of(source, given["out"], options), bar)
            echo(dumps(seen.record())) if as_json else echo_wrapped(str(seen))
            return
        result = bf16kit.convert(source, out=given["out"], progress=True, **options)
    except Bf16kitError as error:
        if as_json:
            echo(dumps({"version": VERSION, "published": False, "error": str(error)}))
        elif isinstance(error, MapNeeded):
            echo(error.template)
        raise
    told = (result.artifact, result.notes, result.seconds)
    if as_json:
        echo(dumps(record(*told)))
    else:
        echo_wrapped(closing(*told, verbose=given["verbose"]))


def _is_collection(source: Path, out: Path) -> bool:
    """Whether there are many checkpoints: a directory that is no model, and a repository to put models into.

    Raises :class:`UsageError` for a directory that is one source if ``out`` would do only for many.
    """
    if _VERSION.fullmatch(out.name) or not source.is_dir():
        return False
    from bf16kit.converter.read.detect import recognise
    from bf16kit.messages.errors import NoCheckpoint, SourceError, UsageError

    try:
        what = f"{source} is {recognise(source).value}"
    except NoCheckpoint:
        return True
    except SourceError as error:
        what = str(error)
    raise UsageError(
        f"--out {out}: must end in MODEL/VERSION, with a version of 1 or more, and ends in {out.absolute().name!r}."
        f" A path without a version is allowed only for a directory of checkpoints, and {what}"
    )
