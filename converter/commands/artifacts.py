"""The commands that read an artifact: inspect, verify, explain, restore."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from bf16kit import errors
from converter.commands.common import PATH, debug_option, json_option, samples_option, say


@click.command()
@click.argument("artifact", type=PATH)
@json_option
@debug_option
def inspect(artifact: Path, as_json: bool, debug: bool) -> None:
    """Show what ARTIFACT holds: verdict, plan, sizes, drift, digests."""
    from bf16kit import document
    from converter.report.inspect import describe, record

    say(document.dumps(record(artifact)) if as_json else describe(artifact))


@click.command()
@click.argument("artifact", type=PATH)
@samples_option
@click.option(
    "--profile",
    "profiles",
    multiple=True,
    type=click.Choice(["cpu", "cpu-bf16", "cuda", "torchscript", "pt2", "safetensors", "hf"]),
    help="Profiles and exports to run; may be given more than once.  [default: all in the artifact]",
)
@json_option
@debug_option
def verify(artifact: Path, samples: str | None, profiles: tuple[str, ...], as_json: bool, debug: bool) -> None:
    """Check every digest of ARTIFACT, then its drift from the fp32 reference against its budget."""
    from bf16kit import document
    from bf16kit.runtime import kernel
    from converter.proof.verify import verify as verify_artifact

    kernel.chosen()
    verified = verify_artifact(artifact, samples, profiles)
    say(document.dumps(verified.record()) if as_json else verified.text())
    verified.check()


@click.command()
@click.argument("artifact", type=PATH)
@samples_option
@click.option(
    "--profile",
    "profiles",
    multiple=True,
    type=click.Choice(["cpu", "cpu-bf16", "cuda"]),
    help="Profiles to look into; may be given more than once.  [default: all in the artifact]",
)
@click.option("--artifact", "of", type=PATH, metavar="ARTIFACT", help="That was served, where evidence is looked into.")
@click.option("--json", "as_json", is_flag=True, help="Every layer, as JSON.")
@debug_option
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
        say(explain_artifact(artifact, samples, profiles, as_json=as_json))
        return
    if samples is not None or profiles:
        raise errors.UsageError("evidence names its sample and its profile: leave --samples and --profile out")
    say(explain_evidence(artifact, of, as_json=as_json))


@click.command()
@click.argument("artifact", type=PATH)
@click.option("--out", required=True, type=PATH, metavar="FP32.SAFETENSORS", help="The file to write.")
@click.option("--force", is_flag=True, help="Replace a file that is there already.")
@debug_option
def restore(artifact: Path, out: Path, force: bool, debug: bool) -> None:
    """Give back the checkpoint that ARTIFACT was made from, as one safetensors file.

    Bit for bit where it was fp32, bf16 or fp16; of fp64 tensors that the model uses, what fp32 holds of them.
    """
    from converter.process import progress
    from converter.restore import restore as restore_artifact

    with progress.on(sys.stderr) as bar:
        say(restore_artifact(artifact, out, force=force, progress=bar))
