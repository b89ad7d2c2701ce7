"""The commands that read an artifact: inspect, verify, explain, restore."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from bf16kit.converter.commands import PATH, debug_option, echo, json_option, samples_option
from bf16kit.messages import errors


def _profile_option(*names: str, text: str) -> Callable[[Any], Any]:
    text += "; may be given more than once.  [default: all in the artifact]"
    return click.option("--profile", "profiles", multiple=True, type=click.Choice(names), help=text)


@click.command()
@click.argument("artifact", type=PATH)
@json_option
@debug_option
def inspect(artifact: Path, as_json: bool, debug: bool) -> None:
    """Show what ARTIFACT holds: verdict, plan, sizes, drift, digests."""
    from bf16kit.converter.report.inspect import describe, record
    from bf16kit.messages.wording import dumps

    echo(dumps(record(artifact)) if as_json else describe(artifact))


@click.command()
@click.argument("artifact", type=PATH)
@samples_option
@_profile_option(
    "cpu", "cpu-bf16", "cuda", "torchscript", "pt2", "safetensors", "hf", text="A profile or export to run"
)
@json_option
@debug_option
def verify(artifact: Path, samples: str | None, profiles: tuple[str, ...], as_json: bool, debug: bool) -> None:
    """Check every digest of ARTIFACT, then its drift from the fp32 reference against its budget."""
    from bf16kit.converter.verify.verify import verify as verify_artifact
    from bf16kit.messages.wording import dumps
    from bf16kit.runtime.ort import kernel

    kernel.configured_kernel()
    verified = verify_artifact(artifact, samples, profiles)
    echo(dumps(verified.record()) if as_json else verified.text())
    verified.check()


@click.command()
@click.argument("artifact", type=PATH)
@samples_option
@_profile_option("cpu", "cpu-bf16", "cuda", text="A profile to explain")
@click.option(
    "--artifact", "of", type=PATH, metavar="ARTIFACT", help="The served artifact, if the argument is an evidence file."
)
@json_option
@debug_option
def explain(
    artifact: Path, samples: str | None, profiles: tuple[str, ...], of: Path | None, as_json: bool, debug: bool
) -> None:
    """Show which layers of ARTIFACT cause its drift, and which --keep-fp32 would bring it within budget.

    ARTIFACT may also be a file that `bf16-serve evidence` wrote, together with --artifact. It then shows whether the
    artifact gives the response that was over budget, and which layer's error exceeds that of rounding on this input.
    The cuda profile is emulated on the CPU.
    """
    from bf16kit.converter.islands.explanation import explain as explain_artifact
    from bf16kit.converter.islands.reproduction import explain_evidence
    from bf16kit.converter.process import progress
    from bf16kit.runtime.ort import kernel

    kernel.configured_kernel()
    if of is None and artifact.is_file():
        raise errors.UsageError(
            f"{artifact}: is a file, expected an artifact's directory; if it is an evidence file, pass --artifact"
            " DIRECTORY as well"
        )
    if of is not None and (samples is not None or profiles):
        raise errors.UsageError("an evidence file holds its own sample and profile; leave out --samples and --profile")
    with progress.for_stream(sys.stderr) as bar:
        if of is None:
            said = explain_artifact(artifact, samples, profiles, bar, as_json=as_json)
        else:
            said = explain_evidence(artifact, of, bar, as_json=as_json)
    echo(said)


@click.command()
@click.argument("artifact", type=PATH)
@click.option("--out", required=True, type=PATH, metavar="FP32.SAFETENSORS", help="The file to write.")
@click.option("--force", is_flag=True, help="Replace an existing file.")
@debug_option
def restore(artifact: Path, out: Path, force: bool, debug: bool) -> None:
    """Write the checkpoint that ARTIFACT was made from, as one safetensors file.

    fp32, bf16 and fp16 tensors are restored bit for bit. fp64 tensors that the model uses are rounded to fp32.
    """
    from bf16kit.converter.process import progress
    from bf16kit.converter.restore import restore as restore_artifact

    with progress.for_stream(sys.stderr) as bar:
        echo(restore_artifact(artifact, out, force=force, progress=bar))
