"""``python -m deploy.ray``: serve a repository on a Ray cluster. Takes options of `bf16-serve`, and Ray's own."""

from __future__ import annotations

import logging
import os
import sys
from pathlib import Path
from typing import Any

import click

from bf16kit.errors import Bf16kitError, ConfigError
from bf16kit.wording import first_line

_EXIT_UNCLEAN = 1
_EXIT_USAGE = 2


@click.command(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.option("--repository", metavar="DIRECTORY", help="Directory of <model>/<version>/ artifacts, on every node.")
@click.option("--host", help="Where metrics and pages are answered; gRPC is on all addresses.  [default: 127.0.0.1]")
@click.option("--grpc-port", type=int, help="Port of the inference protocol, Ray's gRPC proxy.  [default: 8001]")
@click.option("--http-port", type=int, help="Port of /targets, /readyz and the status page.  [default: 8002]")
@click.option("--device", help="auto, cpu, or cuda:N.  [default: auto]")
@click.option(
    "--model-control", type=click.Choice(["none", "poll"]), help="Models as at the start, or as the repository changes."
)
@click.option("--token-file", metavar="FILE", help="Lines of 'token scope[,scope]', on every node.")
@click.option("--log-format", type=click.Choice(["text", "json"]), help="One line, or one JSON object, per event.")
@click.option(
    "--config", "file", type=click.Path(path_type=Path), envvar="BF16KIT_CONFIG", help="server.yaml, as of bf16-serve."
)
@click.option(
    "--address",
    help="Of a Ray cluster: auto, HOST:PORT or ray://…  [default: RAY_ADDRESS, or one of its own on this machine]",
)
@click.option("--min-replicas", type=int, default=1, show_default=True, help="Of each model.")
@click.option("--max-replicas", type=int, help="Of each model; more than the least: autoscaled.  [default: the least]")
@click.option(
    "--target", type=float, default=16.0, show_default=True, help="Requests in flight that a replica is to have."
)
@click.option(
    "--queued", type=int, default=256, show_default=True, help="Requests that may wait in a proxy; more are refused."
)
@click.option("--cpus", type=float, default=1.0, show_default=True, help="Processors of a replica, and its threads.")
@click.option("--gpus", type=float, default=0.0, show_default=True, help="GPUs of a replica.")
@click.option(
    "--per-node", type=int, default=0, help="Replicas of a model on one node at most.  [default: as many as fit]"
)
@click.option(
    "--proxies",
    type=click.Choice(["HeadOnly", "EveryNode"]),
    default="EveryNode",
    show_default=True,
    help="On which nodes Ray's proxies listen.",
)
@click.option("--detach", is_flag=True, help="End once it is deployed, and leave it running.")
@click.option("--print-config", is_flag=True, help="Print Ray Serve's configuration of it (serveConfigV2), and end.")
def main(file: Path | None, **given: Any) -> None:
    """Serve bf16 artifacts on a Ray cluster: each model in replicas of its own, where there is memory for it.

    SIGTERM removes what this has deployed, once the requests at work are answered. See docs/scaling.md.
    """
    try:
        _run(file, given)
    except Bf16kitError as error:
        click.echo(f"deploy.ray: {error}", err=True)
        sys.exit(_EXIT_USAGE)


def _run(file: Path | None, given: dict[str, Any]) -> None:
    from deploy.ray.settings import Scaling, check
    from service.process.config import load_config
    from service.process.environment import unread
    from service.process.logs import configure
    from service.process.stop import Stop

    own = {name: given.pop(name) for name in ("address", "proxies", "detach", "print_config")}
    least, most = given.pop("min_replicas"), given.pop("max_replicas")
    names = ("target", "queued", "cpus", "gpus", "per_node")
    scaling = Scaling(least, least if most is None else most, **{name: given.pop(name) for name in names})
    config = check(load_config(given, file))
    try:
        from deploy.ray import cluster
    except ModuleNotFoundError as error:
        if (error.name or "").split(".")[0] not in ("ray", "starlette"):
            raise
        raise ConfigError("this needs Ray: pip install 'bf16kit[ray]'") from None
    if own["print_config"]:
        _print(cluster.as_config(config, scaling, _wishes(config), own["proxies"]))
        return
    stop = Stop()
    configure(config.log_level, config.log_format)
    log = logging.getLogger("deploy.ray")
    if ignored := unread(os.environ):
        log.warning("%s", ignored)
    cluster.join(own["address"], config)
    stop.on_signals()  # after ray.init, which installs handlers of its own
    deployed = cluster.Deployed(config, scaling)
    try:
        cluster.open_ports(config, own["proxies"])
        deployed.follow()
    except cluster.FAILURES as error:
        raise ConfigError(f"the cluster does not deploy this: {first_line(error)}") from None
    log.info(
        "gRPC on port %d; /targets and status page on http://%s:%d/", config.grpc_port, config.host, config.http_port
    )
    if own["detach"]:
        return
    cluster.follow(deployed, config, stop)
    log.info("stopping: what was deployed is removed")
    try:
        deployed.remove()
    except cluster.FAILURES as error:
        log.error("what was deployed cannot be removed: %s", first_line(error))
        sys.exit(_EXIT_UNCLEAN)


def _wishes(config: Any) -> Any:
    from service.models.directory import Directory

    return Directory(config.repository).look().wishes


def _print(config: dict[str, Any]) -> None:
    import yaml

    click.echo(yaml.safe_dump(config, sort_keys=False), nl=False)


if __name__ == "__main__":
    main()
