"""``bf16-serve bench``: measures a local model on this machine, and suggests settings for it."""

from __future__ import annotations

from pathlib import Path

import click

from service.commands import output


@click.command()
@click.argument("model")
@click.option("--version", type=click.IntRange(min=1), metavar="N", help="Which version.  [default: the newest served]")
@output.repository
@output.config_file
@click.option("--device", help="auto, cpu, or cuda:N.  [default: the server's]")
@click.option(
    "--seconds",
    type=click.FloatRange(min=1, max=3600),
    default=30.0,
    show_default=True,
    help="About how long to measure; longer if single runs take longer.",
)
@click.option("--rows", metavar="N,N,…", help="Batch sizes to measure.  [default: 1, 2, 4, … max_batch_size]")
@click.option(
    "--request-rows", type=click.IntRange(min=1), default=1, show_default=True, help="Rows of one client's request."
)
@click.option(
    "--input", "shapes", multiple=True, metavar="NAME=SHAPE", help="The shape of an input, e.g. input_ids=1x128."
)
@click.option(
    "--samples",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Inputs, .npz or .safetensors.  [default: the golden samples, or zeros]",
)
@click.option(
    "--target-ms", type=click.FloatRange(min=0, min_open=True), help="Limit of the suggestion's p99 latency, in ms."
)
@click.option(
    "--write", is_flag=True, help="Write the suggestion into the model's serving.yaml, and show what changed."
)
@output.as_json
def bench(
    model: str, repository: str | None, file: Path | None, device: str | None, as_json: bool, **given: object
) -> None:
    """Measure MODEL without a network, and suggest max_batch_size and instances.

    Three tables: the runtime alone, by profile and batch size; the runtime alone, in as many batches at once as a
    layout (instances × threads) has; and 1, 2, 4, … 64 clients that wait for each answer, through the server's own
    batcher. Compared settings run in turn. Ctrl-C ends it, and nothing is written. Exit codes: 0; 1 the model cannot be
    served; 2 wrong usage.
    """
    from bf16kit.runtime.ort import kernel
    from service.commands.benchresult import Options, text
    from service.commands.benchtables import measure
    from service.config.heap import bound_heap
    from service.config.logs import configure
    from service.config.serverconfig import load_config

    bound_heap()
    configure("error")
    with output.exit_on_errors("bench"):
        kernel.configured_kernel()
        config = load_config({"repository": repository, "device": device}, file)
        options = Options.parse(model, config, **given)  # type: ignore[arg-type]  # click has checked them
        found = measure(options)
        if not as_json:
            output.echo(text(found))
        difference = found.write() if options.write else ""
    if as_json:
        output.echo_json(found.record())
    elif options.write:
        output.echo(difference or f"{found.file} has these values already")
