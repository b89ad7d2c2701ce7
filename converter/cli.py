"""``bf16-convert``: the command line. Everything heavy is imported by the command that needs it."""

from __future__ import annotations

import gc
import io
import sys
import traceback
from pathlib import Path
from typing import TYPE_CHECKING

import click

from bf16kit import __version__, errors
from bf16kit.text import printable
from bf16kit.wording import without_long_words

if TYPE_CHECKING:
    from converter.options import Options

DONE = 0
INTERRUPTED = 130  # 128 + SIGINT, as shells say it

# The one table from errors to exit codes; the first class that fits counts.
EXIT_CODES: tuple[tuple[type[BaseException], int], ...] = (
    (errors.BudgetExceeded, 1),
    (errors.UsageError, 2),
    (errors.RequestError, 2),
    (errors.Bf16kitError, 3),  # a model that cannot be converted, or does not run
    (OSError, 2),  # a file of the user's went away, or its disk failed
)
BUG = 3

_PATH = click.Path(path_type=Path)


def main() -> None:
    """The entry point: run the command, say what went wrong in one message, exit with the table's code."""
    if isinstance(sys.stdout, io.TextIOWrapper):  # a terminal without × or – is no reason to fail
        sys.stdout.reconfigure(errors="backslashreplace")
    code = run(sys.argv[1:])
    gc.freeze()  # or the interpreter visits torch's objects once more on its way out, which takes 1.6 s
    sys.exit(code)


def run(arguments: list[str]) -> int:
    """Run ``bf16-convert`` with ``arguments`` and return its exit code."""
    debug = "--debug" in arguments
    try:
        command(args=arguments, prog_name="bf16-convert", standalone_mode=False)
    except click.exceptions.Exit as stop:  # --help and --version
        return stop.exit_code
    except click.ClickException as error:
        error.show()
        return error.exit_code
    except (click.Abort, KeyboardInterrupt):
        click.echo("bf16-convert: interrupted; nothing was published", err=True)
        return INTERRUPTED
    except Exception as error:  # noqa: BLE001 - the outermost: whatever it is becomes a message and an exit code
        if debug:
            traceback.print_exc()
        click.echo(f"bf16-convert: error: {printable(without_long_words(_message(error)))}", err=True)
        return exit_code(error)
    return DONE


def exit_code(error: BaseException) -> int:
    """The code for ``error`` by :data:`EXIT_CODES`; an error that is in none of its classes is a bug."""
    return next((code for kind, code in EXIT_CODES if isinstance(error, kind)), BUG)


def _message(error: Exception) -> str:
    if isinstance(error, errors.Bf16kitError):
        return str(error)
    if isinstance(error, OSError) and error.strerror:
        where = f"{error.filename}: " if error.filename else ""
        return f"{where}{error.strerror}"
    if isinstance(error, MemoryError):
        return "out of memory"
    return (
        f"unexpected {type(error).__name__}: {error}; this is a bug in bf16-convert:"
        " run it again with --debug and report what it prints"
    )


def _say(text: str) -> None:
    click.echo(printable(text))


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(__version__)
def command() -> None:
    """Turn fp32 checkpoints into bf16 artifacts, and prove what that cost in accuracy.

    Exit codes: 0 done; 1 drift over budget, nothing published; 2 wrong usage or unreadable input; 3 a model that cannot
    be converted.
    """


_samples = click.option(
    "--samples", metavar="FILE|DIR|PKG.MOD:FN", help="Inputs to run.  [default: the golden samples]"
)
_debug = click.option("--debug", is_flag=True, help="Show the traceback of an error.")


@command.command()
@click.argument("source", type=_PATH)
@click.option("--out", required=True, type=_PATH, metavar="REPOSITORY/MODEL/VERSION", help="Where the artifact goes.")
@click.option("--force", is_flag=True, help="Replace an artifact that is there already.")
@click.option("--model", metavar="PKG.MOD:FACTORY", help="What builds the module, for bare weights.")
@click.option("--model-args", metavar="JSON", help="Keyword arguments of the factory.")
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
    type=click.Choice(["onnx", "torchscript"]),
    help="May be given twice.  [default: both where the source allows]",
)
@click.option(
    "--profile",
    "profiles",
    multiple=True,
    type=click.Choice(["cpu", "cpu-bf16", "cuda"]),
    help="ONNX profiles to write; may be given more than once.  [default: cpu and cuda, and cpu-bf16 where it keeps to"
    " the budget]",
)
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
@_debug
def checkpoint(debug: bool, **given: object) -> None:
    """Convert SOURCE: a Hugging Face directory, safetensors, a torch state dict, or ONNX."""
    from bf16kit.runtime import kernel
    from converter.pipeline import convert
    from converter.process import memory, progress
    from converter.report import page

    kernel.chosen()  # a wrong BF16KIT_KERNEL_PATH is known now, not when all is written and the first graph is run
    memory.map_large_blocks()
    memory.keep_few_primitives()

    options = _options(**given)
    with progress.on(sys.stderr) as bar:
        result = convert(options, bar)
    _say(page.summary(result.artifact, result.notes))


def _options(**given: object) -> Options:
    """Parsed options; a mistake in any of them is found before long work begins."""
    from converter import options as parse

    def many(name: str) -> tuple[str, ...]:
        values = given.pop(name)
        assert isinstance(values, tuple)  # noqa: S101 - click's `multiple=True`
        return values

    from bf16kit.drift import Budget

    out, model_args, profiles = given.pop("out"), given.pop("model_args"), many("profiles")
    assert isinstance(out, Path)  # noqa: S101 - click's `type=_PATH`
    return parse.Options(
        target=parse.parse_target(out),
        model_args=parse.parse_model_args(str(model_args) if model_args is not None else None),
        inputs=parse.parse_inputs(many("inputs")),
        outputs=parse.parse_outputs(many("outputs")),
        formats=many("formats"),  # type: ignore[arg-type]  # click.Choice checked them
        profiles=profiles or ("cpu", "cuda"),  # type: ignore[arg-type]
        optional=() if profiles else ("cpu-bf16",),
        keep_fp32=parse.parse_patterns("--keep-fp32", many("keep_fp32")),
        bf16=parse.parse_patterns("--bf16", many("bf16")),
        budget=Budget.parse(many("budget")),
        **given,  # type: ignore[arg-type]
    )


_json = click.option("--json", "as_json", is_flag=True, help="Write JSON for programs: docs/json.md says what.")


@command.command()
@click.argument("artifact", type=_PATH)
@_json
@_debug
def inspect(artifact: Path, as_json: bool, debug: bool) -> None:
    """Show what ARTIFACT holds: verdict, plan, sizes, drift, digests."""
    from bf16kit import document
    from converter.report.inspect import describe, record

    _say(document.dumps(record(artifact)) if as_json else describe(artifact))


@command.command()
@click.argument("artifact", type=_PATH)
@_samples
@click.option(
    "--profile",
    "profiles",
    multiple=True,
    type=click.Choice(["cpu", "cpu-bf16", "cuda", "torchscript"]),
    help="Profiles to run; may be given more than once.  [default: all in the artifact]",
)
@_json
@_debug
def verify(artifact: Path, samples: str | None, profiles: tuple[str, ...], as_json: bool, debug: bool) -> None:
    """Check every digest of ARTIFACT, then its drift from the fp32 reference against its budget."""
    from bf16kit import document
    from bf16kit.runtime import kernel
    from converter.proof.verify import verify as verify_artifact

    kernel.chosen()
    verified = verify_artifact(artifact, samples, profiles)
    _say(document.dumps(verified.record()) if as_json else verified.text())
    verified.check()


@command.command()
@click.argument("artifact", type=_PATH)
@_samples
@click.option(
    "--profile",
    "profiles",
    multiple=True,
    type=click.Choice(["cpu", "cpu-bf16", "cuda"]),
    help="Profiles to look into; may be given more than once.  [default: all in the artifact]",
)
@click.option(
    "--artifact", "of", type=_PATH, metavar="ARTIFACT", help="That was served, where evidence is looked into."
)
@click.option("--json", "as_json", is_flag=True, help="Every layer, as JSON.")
@_debug
def explain(
    artifact: Path, samples: str | None, profiles: tuple[str, ...], of: Path | None, as_json: bool, debug: bool
) -> None:
    """Show where the drift of ARTIFACT comes from, layer by layer, and what --keep-fp32 would mend it.

    In place of ARTIFACT, a file that `bf16-serve evidence` has written, with --artifact: whether the artifact gives
    what was served over budget, and which layer left the expected line on exactly that input. The cuda profile is
    emulated on the CPU.
    """
    from bf16kit.runtime import kernel
    from converter.proof.explanation import explain as explain_artifact
    from converter.proof.reproduction import explain_evidence

    kernel.chosen()
    if of is None:
        if artifact.is_file():
            raise errors.UsageError(
                f"{artifact}: is a file; for evidence of a breach give --artifact DIRECTORY as well"
            )
        _say(explain_artifact(artifact, samples, profiles, as_json=as_json))
        return
    if samples is not None or profiles:
        raise errors.UsageError("evidence names its sample and its profile: leave --samples and --profile out")
    _say(explain_evidence(artifact, of, as_json=as_json))


@command.command()
@click.argument("artifact", type=_PATH)
@click.option("--out", required=True, type=_PATH, metavar="FP32.SAFETENSORS", help="The file to write.")
@click.option("--force", is_flag=True, help="Replace a file that is there already.")
@_debug
def restore(artifact: Path, out: Path, force: bool, debug: bool) -> None:
    """Give back the fp32 checkpoint that ARTIFACT was made from, bit for bit, as one safetensors file."""
    from converter.process import progress
    from converter.restore import restore as restore_artifact

    with progress.on(sys.stderr) as bar:
        _say(restore_artifact(artifact, out, force=force, progress=bar))


if __name__ == "__main__":
    main()
