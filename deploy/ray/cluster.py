"""Telling Ray what is to run, now and as the repository changes."""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import ray
from bf16kit.errors import ConfigError
from bf16kit.rayaddress import knock
from bf16kit.wording import first_line
from deploy.ray import applications
from deploy.ray.calls import FRONT, IN_PROXIES, application
from deploy.ray.placement import place
from deploy.ray.settings import Scaling
from ray import serve
from ray.exceptions import RayError
from ray.serve.api import RunTarget
from ray.serve.exceptions import RayServeException
from service.contract import State
from service.models.directory import Directory
from service.models.plan import Wish
from service.models.retries import Retries
from service.process.config import ENV_PREFIX, ServerConfig
from service.process.ports import listen
from service.process.stop import Stop
from service.workers.view import SlotState

_log = logging.getLogger(__name__)
_ADDRESS = "RAY_ADDRESS"  # Ray's variable
_OWN = "local"  # Ray's word for a new cluster
INGRESS = "deploy.ray.ingress.add_inference"
_LOG = {"log_level": "WARNING", "enable_access_log": False}
_ROOT = Path(__file__).parents[2]
_LOOK_SECONDS = 1.0
_REMOVED_LOOK_SECONDS = 0.2
_REMOVE_SECONDS = 15.0  # beyond the time that requests have to end, for Ray to end what is left
# Ray starts what it has not given up again by itself.
_STATES: Mapping[str, State] = {"RUNNING": "ready", "DEPLOY_FAILED": "unavailable"}
#: What Ray raises where the cluster does not do what it is told.
FAILURES = (RayError, RayServeException, TimeoutError, ConnectionError)


def join(address: str | None, config: ServerConfig) -> None:
    """Be part of the cluster at ``address``, or else at RAY_ADDRESS, or start one on this machine, without its
    dashboard and without what it tells its makers: not given, Ray would join whichever it finds. Raises ConfigError
    where there is none.

    Ray's own processes read the environment when they start: what is set here is for those of a cluster that begins.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_SERVE_GRPC_MAX_MESSAGE_SIZE", str(config.max_message_bytes))
    for key in IN_PROXIES:
        os.environ.setdefault(f"{ENV_PREFIX}{key.upper()}", str(getattr(config, key)))
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(_ROOT), os.environ.get("PYTHONPATH"))))
    given = "--address" if address else _ADDRESS
    address = address or os.environ.get(_ADDRESS) or _OWN
    try:
        knock(address)
        ray.init(address=address, include_dashboard=False if address == _OWN else None, logging_level="WARNING")
    except (OSError, ValueError, RuntimeError) as error:
        if address == _OWN:
            raise ConfigError(f"no Ray cluster starts on this machine: {first_line(error)}") from None
        raise ConfigError(f"{given} {address}: no Ray cluster is reached: {first_line(error)}") from None


def open_ports(config: ServerConfig, location: str) -> None:
    """Start Ray's proxies, unless they run: their ports stay what they were then. Raises ConfigError for a port of this
    machine that is taken: Ray would try it for minutes, or share it with another cluster's proxies."""
    if serve.status().proxies:
        _log.warning("Ray Serve runs in this cluster already: its ports are those that it was started with")
    elif _listens_here(location):
        for host, port, flag in (
            ("0.0.0.0", config.grpc_port, "--grpc-port"),  # noqa: S104 -- where Ray listens, whatever it is told
            (config.host, config.http_port, "--http-port"),
        ):
            listen(host, port, flag).close()
    serve.start(
        proxy_location=location,
        http_options={"host": config.host, "port": config.http_port},
        grpc_options={"port": config.grpc_port, "grpc_servicer_functions": [INGRESS], "enable_reflection": False},
        logging_config=_LOG,
    )


def _run(targets: list[RunTarget]) -> None:
    if targets:
        serve.run_many(targets, wait_for_ingress_deployment_creation=False, wait_for_applications_running=False)


def _fits(takes: Mapping[str, float]) -> bool:
    """Whether a node has all of that, in use or not."""
    return any(
        node["Alive"] and all(node["Resources"].get(of, 0.0) >= amount for of, amount in takes.items())
        for node in ray.nodes()
    )


def _listens_here(location: str) -> bool:
    """Whether this machine is of the cluster, and has a proxy."""
    if ray.util.client.ray.is_connected():
        return False
    own = ray.get_runtime_context().get_node_id()
    return location == "EveryNode" or any(
        node["NodeID"] == own and "node:__internal_head__" in node["Resources"] for node in ray.nodes()
    )


class Deployed:
    """The applications of one repository. :meth:`follow` deploys what has changed in it since, and nothing else."""

    def __init__(self, config: ServerConfig, scaling: Scaling) -> None:
        self._config = config
        self._scaling = scaling
        self._directory = Directory(config.repository)
        self._wishes: dict[str, Wish] | None = None
        self._notes: set[str] = set()
        self._places: list[SlotState] = []
        self._retries = Retries(lambda: self._places)

    @property
    def names(self) -> list[str]:
        """Of the applications."""
        return [FRONT, *map(application, self._wishes or ())]

    def follow(self) -> None:
        """Does not wait: models load side by side, and one that cannot be served holds up no other.

        Raises ConfigError when the repository cannot be listed.
        """
        seen = self._directory.look(self._wishes)
        for note in sorted({*seen.notes} - self._notes):
            _log.warning("%s", note)
        self._notes = {*seen.notes}
        before = self._wishes
        if before == seen.wishes:
            return
        if not seen.wishes:
            _log.warning("%s", self._directory.nothing_to_serve(self._config.model_control))
        if before is None:
            arguments = applications.all_of(self._config, self._scaling, seen.wishes)[FRONT]
            _run([RunTarget(applications.front(arguments), FRONT, "/", _LOG)])
        self._deploy([wish for name, wish in seen.wishes.items() if wish != (before or {}).get(name)])
        for name in sorted((before or {}).keys() - seen.wishes.keys()):
            _log.info("model %r: removed", name)
            serve.delete(application(name), _blocking=False)
        self._wishes = seen.wishes  # now: what could not be told is told again

    def _deploy(self, wishes: Sequence[Wish]) -> None:
        arguments = applications.all_of(self._config, self._scaling, {wish.name: wish for wish in wishes})
        targets = []
        for wish in wishes:
            app = application(wish.name)
            _log.info("model %r: deploying version %s", wish.name, ", ".join(map(str, sorted(wish.versions))))
            targets.append(RunTarget(applications.model(arguments[app]), app, applications.route(app), _LOG))
            takes = self._scaling.takes(place(wish, self._config).memory)
            if not _fits(takes):
                _log.warning(
                    "model %r: no node of the cluster has what a replica takes, %s; it waits for one that has",
                    wish.name,
                    ", ".join(f"{amount:,.10g} {of}" for of, amount in takes.items()),
                )
        _run(targets)

    def retry(self, states: Mapping[str, str]) -> None:
        """Deploy again what Ray has given up, ever more rarely: why may have passed, and nothing tells of it.
        ``states``: as of :meth:`states`."""
        self._places = [
            SlotState(name, version, _STATES.get(states[application(name)], "loading"))
            for name, wish in (self._wishes or {}).items()
            for version in wish.versions
        ]
        self._deploy(self._retries.due(self._wishes or {}))

    def remind(self) -> None:
        """Tell the front what there is to be: one that was started anew knows what there was."""
        models = {name: sorted(wish.versions) for name, wish in (self._wishes or {}).items()}
        serve.get_app_handle(FRONT).want.remote(models)

    def states(self) -> dict[str, str]:
        """What Ray says of each application, by its name: RUNNING, DEPLOYING, UNHEALTHY and so on."""
        found = serve.status().applications
        return {name: str(found[name].status.value) if name in found else "NOT_STARTED" for name in self.names}

    def remove(self) -> None:
        """All of them, and nothing that others run: not ready for ``lame_duck_seconds``, and then all models side by
        side, once their requests are answered."""
        with contextlib.suppress(*FAILURES):  # it may be gone
            serve.get_app_handle(FRONT).retire.remote()
        time.sleep(self._config.lame_duck_seconds)  # a second signal ends the program at once
        front, *models = self.names
        for some in (models, [front]):
            for name in some:
                serve.delete(name, _blocking=False)
            self._wait_until_removed(some)

    def _wait_until_removed(self, names: list[str]) -> None:
        until = time.monotonic() + self._config.drain_seconds + _REMOVE_SECONDS
        while left := sorted(serve.status().applications.keys() & set(names)):
            if time.monotonic() > until:
                _log.warning("not removed in time: %s; Ray goes on with it", ", ".join(left))
                return
            time.sleep(_REMOVED_LOOK_SECONDS)


def follow(deployed: Deployed, config: ServerConfig, stop: Stop) -> None:
    """Until ``stop``: say how applications come and go and, with ``model_control: poll``, look at the repository."""
    told: dict[str, str] = {}
    until_poll = config.poll_seconds
    while not stop.wait(_LOOK_SECONDS):
        until_poll -= _LOOK_SECONDS
        try:
            if config.model_control == "poll" and until_poll <= 0:
                until_poll = config.poll_seconds
                deployed.follow()
            deployed.remind()
            now = deployed.states()
            deployed.retry(now)
        except Exception as error:  # noqa: BLE001 -- of the cluster or a file system; what serves goes on serving
            _log.warning("looking at the cluster and the repository failed; it goes on: %s", first_line(error))
            continue
        for name, state in now.items():
            if told.get(name) != state:
                _log.info("%s: %s", name, state)
        told = now


def as_config(config: ServerConfig, scaling: Scaling, wishes: dict[str, Wish], location: str) -> dict[str, Any]:
    """Ray Serve's own configuration of all that: for ``serve deploy``, or a RayService's ``serveConfigV2``."""
    listed = []
    for name, arguments in applications.all_of(config, scaling, wishes).items():
        function, route = ("front", "/") if name == FRONT else ("model", applications.route(name))
        path = f"deploy.ray.applications:{function}"
        listed.append({"name": name, "route_prefix": route, "import_path": path, "args": arguments})
    return {
        "proxy_location": location,
        "http_options": {"host": config.host, "port": config.http_port},
        "grpc_options": {"port": config.grpc_port, "grpc_servicer_functions": [INGRESS], "enable_reflection": False},
        "logging_config": _LOG,
        "applications": listed,
    }
