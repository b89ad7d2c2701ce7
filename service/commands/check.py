"""``bf16-serve check``: checks whether a server with these options would serve, and reports what prevents it."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from service.commands import output


@click.command()
@click.argument("models", nargs=-1, metavar="[MODEL]...")
@click.option("--load/--no-load", default=True, help="Load each model, and run its golden samples, as a server does.")
@click.option("--ports/--no-ports", default=True, help="Check that the ports are free (not beside a running server).")
@output.as_json
def check(models: tuple[str, ...], load: bool, ports: bool, as_json: bool, file: Path | None, **flags: object) -> None:
    """Check configuration, TLS and token files, ports, and every model (or only MODEL), with the server's own code.

    Takes all options of the server, its environment and server.yaml. One model is loaded at a time and freed
    again. Exit codes: 0 all checks passed; 1 a check failed, and its line says why; 2 wrong usage.
    """
    from service.commands.checks import Checks
    from service.config.heap import bound_heap
    from service.config.logs import configure

    bound_heap()
    configure("error")
    checks = Checks(models, load=load, ports=ports)
    with output.exit_on_errors("check"):
        for finding in checks.run(flags, file):
            if not as_json:
                output.echo(finding.line())
    if as_json:
        output.echo_json({"version": 1, "ok": not checks.failed, "findings": checks.findings})
    else:
        output.echo(checks.summary())
    sys.exit(output.FAILED if checks.failed else 0)
