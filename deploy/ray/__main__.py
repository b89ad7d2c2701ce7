"""``python -m deploy.ray``: serve a repository on a Ray cluster. Takes options of `bf16-serve`, and Ray's own."""

from __future__ import annotations

import logging
import os
import sys
from pathlib import Path
from typing import Any

import click
import yaml

from bf16kit.messages.errors import Bf16kitError, ConfigError
from bf16kit.messages.wording import first_line

_log = logging.getLogger("deploy.ray")
_EXIT_UNCLEAN = 1
_EXIT_USAGE = 2


@click.command(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.option("--repository", metavar="DIRECTORY", help="Directory of <model>/<version>/ artifacts, on every node.")
@click.option("--host", help="Address of metrics and probes; gRPC listens on all addresses.  [default: 127.0.0.1]")
@click.option("--grpc-port", type=int, help="Port of the inference protocol, Ray's gRPC proxy.  [default: 8001]")
@click.option("--http-port", type=int, help="Port of /targets, /readyz and /status.json.  [default: 8002]")
@click.option("--device", help="auto, cpu, or cuda:N.  [default: auto]")
@click.option("--model-control", help="none: load at start only; poll: follow the repository.  [default: none]")
@click.option("--token-file", metavar="FILE", help="Lines of 'token scope[,scope]', on every node.")
@click.option("--log-format", help="One line (text) or one JSON object (json) per event.  [default: text]")
@click.option(
    "--config", "file", type=click.Path(path_type=Path), envvar="BF16KIT_CONFIG", help="server.yaml, as for bf16-serve."
)
@click.option("--address", help="auto, HOST:PORT or ray://…  [default: RAY_ADDRESS, or a new cluster on this machine]")
@click.option("--min-replicas", type=int, help="Replicas of each model.  [default: 1]")
@click.option("--max-replicas", type=int, help="More than --min-replicas: autoscaled.  [default: --min-replicas]")
@click.option("--fronts", type=int, help="Processes that pass requests on to the replicas.  [default: 1]")
@click.option("--target", type=float, help="Requests in flight per replica to scale for.  [default: 16]")
@click.option("--queued", type=int, help="Requests that may wait in a front; more are rejected.  [default: 256]")
@click.option("--cpus", type=float, help="Processors and threads of a replica.  [default: 1]")
@click.option("--gpus", type=float, help="GPUs of a replica.  [default: 0]")
@click.option("--per-node", type=int, help="Most replicas of a model on one node.  [default: as many as fit]")
@click.option(
    "--proxies",
    type=click.Choice(["HeadOnly", "EveryNode"]),
    default="EveryNode",
    show_default=True,
    help="The nodes on which Ray's proxies listen.",
)
@click.option("--detach", is_flag=True, help="Exit once deployed, and leave the deployment running.")
@click.option("--print-config", is_flag=True, help="Print Ray Serve's configuration (serveConfigV2), and exit.")
def main(file: Path | None, **given: Any) -> None:
    """Serve bf16 artifacts on a Ray cluster: each model in replicas of its own, where there is memory for it.

    SIGTERM removes what this has deployed, once the requests in flight are answered. See docs/scaling.md.
    """
    try:
        _run(file, given)
    except Bf16kitError as error:
        click.echo(f"deploy.ray: {error}", err=True)
        sys.exit(_EXIT_USAGE)


def _run(file: Path | None, given: dict[str, Any]) -> None:
    from deploy.ray.settings import Scaling, check
    from service.config.logs import configure
    from service.config.serverconfig import load_config, unknown_variables
    from service.config.stop import Stop
    from service.models.directory import Directory

    own = {name: given.pop(name) for name in ("address", "proxies", "detach", "print_config")}
    scale = {name: value for name in Scaling.model_fields if (value := given.pop(name)) is not None}
    scaling = Scaling.of({"max_replicas": scale.get("min_replicas", 1), **scale})
    config = check(load_config(given, file))
    try:
        from deploy.ray import applications, cluster
    except ModuleNotFoundError as error:
        if (error.name or "").split(".")[0] not in ("ray", "starlette"):
            raise
        raise ConfigError("this needs Ray: pip install 'bf16kit[ray]'") from None
    if own["print_config"]:
        desired_models = Directory(config.repository).scan().desired_models
        told = applications.ray_config(config, scaling, desired_models, own["proxies"])
        click.echo(yaml.safe_dump(told, sort_keys=False), nl=False)
        return
    stop = Stop()
    configure(config.log_level, config.log_format)
    if ignored := unknown_variables(os.environ):
        _log.warning("%s", ignored)
    cluster.join(own["address"], config)
    stop.on_signals()  # after ray.init, which installs handlers of its own
    deployed = cluster.RepositoryDeployment(config, scaling)
    try:
        cluster.open_ports(config, own["proxies"])
        deployed.deploy_changes()
    except cluster.FAILURES as error:
        raise ConfigError(f"the cluster rejected the deployment: {first_line(error)}") from None
    _log.info("gRPC on port %d; /targets and /readyz on http://%s:%d/", config.grpc_port, config.host, config.http_port)
    if own["detach"]:
        return
    cluster.follow(deployed, config, stop)
    _log.info("stopping: removing the deployment")
    try:
        deployed.remove()
    except cluster.FAILURES as error:
        _log.error("the deployment cannot be removed: %s", first_line(error))
        sys.exit(_EXIT_UNCLEAN)


if __name__ == "__main__":
    main()
