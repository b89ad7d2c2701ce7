"""``python -m bf16kit.deploy.ray``: serve a repository on a Ray cluster, with `bf16-serve`'s options and its own."""

from __future__ import annotations

import logging
import os
import sys
from pathlib import Path
from typing import Any

import click

from bf16kit.deploy.ray.settings import Scaling, check
from bf16kit.messages.errors import Bf16kitError, ConfigError
from bf16kit.messages.wording import first_line
from bf16kit.service.cli import EXIT_UNCLEAN, EXIT_USAGE
from bf16kit.service.cli import main as bf16_serve
from bf16kit.service.config.logs import configure
from bf16kit.service.config.loops import Stop
from bf16kit.service.config.serverconfig import load_config, unknown_variables

_log = logging.getLogger("bf16kit.deploy.ray")
_SCALING = [
    click.Option(
        [f"--{name.replace('_', '-')}"],
        metavar="VALUE",
        help=f"{field.description}  [default: {'--min-replicas' if field.default is None else field.default}]",
    )
    for name, field in Scaling.model_fields.items()
]


@click.command(
    params=[*bf16_serve.params, *_SCALING],
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
)
@click.option("--address", help="auto, HOST:PORT or ray://…  [default: RAY_ADDRESS, or a new cluster on this machine]")
@click.option("--detach", is_flag=True, help="Exit once deployed, and leave the deployment running.")
def main(file: Path | None, address: str | None, detach: bool, **given: Any) -> None:
    """Serve bf16 artifacts on a Ray cluster: each model in replicas of its own, where there is memory for it.

    SIGTERM removes what this has deployed, once the requests in flight are answered. See docs/scaling.md.
    """
    try:
        _run(file, address, detach, given)
    except Bf16kitError as error:
        click.echo(f"bf16kit.deploy.ray: {error}", err=True)
        sys.exit(EXIT_USAGE)


def _run(file: Path | None, address: str | None, detach: bool, given: dict[str, Any]) -> None:
    scaling = Scaling.of({name: value for name in Scaling.model_fields if (value := given.pop(name)) is not None})
    config = check(load_config(given, file))
    try:
        from bf16kit.deploy.ray import cluster
        from bf16kit.deploy.ray.models import RAY_ERRORS
    except ModuleNotFoundError as error:
        if (error.name or "").split(".")[0] not in ("ray", "starlette"):
            raise
        raise ConfigError("this needs Ray: pip install 'bf16kit[ray]'") from None
    stop = Stop()
    configure(config.log_level, config.log_format)
    if ignored := unknown_variables(os.environ):
        _log.warning("%s", ignored)
    deployed = cluster.RepositoryDeployment(config, scaling)
    try:
        cluster.join(address, config, scaling.proxies)
        stop.on_signals()  # after ray.init, which installs handlers of its own
        deployed.deploy_changes()
    except RAY_ERRORS as error:
        raise ConfigError(f"the cluster rejected the deployment: {first_line(error)}") from None
    _log.info("gRPC on port %d; /targets and /readyz on http://%s:%d/", config.grpc_port, config.host, config.http_port)
    if detach:
        return
    deployed.follow(stop)
    _log.info("stopping: removing the deployment")
    try:
        deployed.remove()
    except RAY_ERRORS as error:
        _log.error("the deployment cannot be removed: %s", first_line(error))
        sys.exit(EXIT_UNCLEAN)


if __name__ == "__main__":
    main()
