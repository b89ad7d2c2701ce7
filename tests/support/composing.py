"""A compose project that belongs to one test, and single containers of its images, on a real Docker engine."""

import json
import os
import socket
import subprocess
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import pytest

ROOT = Path(__file__).parents[2]
IMAGE = os.environ.get("IMAGE", "bf16kit")
#: Services whose images are available wherever there is an engine. Tests check whether Grafana's image is.
SERVICES = ("convert", "server", "prometheus")
PORTS = ("GRPC_PORT", "HTTP_PORT", "PROMETHEUS_PORT", "GRAFANA_PORT")


def docker(*arguments: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    """Run ``docker …`` and return the ended process, whatever its exit code."""
    env = {**os.environ, "DOCKER_BUILDKIT": "1", "BUILDKIT_PROGRESS": "plain"}
    command = ["docker", *arguments]
    return subprocess.run(command, cwd=ROOT, env=env, input=stdin, capture_output=True, text=True, check=False)


def output_of(done: subprocess.CompletedProcess[str]) -> str:
    """Return the standard output. If the exit code is not 0, the test fails and shows the end of both outputs."""
    if done.returncode != 0:
        pytest.fail(f"{done.args} ended with {done.returncode}:\n{done.stdout[-3000:]}{done.stderr[-3000:]}")
    return done.stdout.strip()


def have_image(name: str) -> bool:
    return docker("image", "inspect", name).returncode == 0


def free_ports(count: int) -> list[str]:
    """Return loopback ports that are free now. Port 0 would not do: a restarted service would get another port."""
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [str(each.getsockname()[1]) for each in sockets]
    for each in sockets:
        each.close()
    return ports


@dataclass(frozen=True)
class Stack:
    """A compose project: its name, its environment, and its compose files."""

    project: str
    environment: Mapping[str, str]
    files: tuple[str, ...] = ("compose.yaml",)

    @classmethod
    def new(cls, project: str, **environment: str) -> Self:
        """Return a project on free ports. Its server logs a line for each request."""
        ports = dict(zip(PORTS, free_ports(len(PORTS)), strict=True))
        return cls(project, {"IMAGE": IMAGE, "BF16KIT_LOG_LEVEL": "debug", **ports, **environment})

    def and_file(self, path: str | Path) -> Self:
        """Return the same project with one more compose file, which overrides the others."""
        return replace(self, files=(*self.files, str(path)))

    def run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run ``docker compose …`` for this project, and return the ended process."""
        files = [word for file in self.files for word in ("--file", file)]
        command = ["docker", "compose", *files, "--project-name", self.project, "--progress", "quiet", *arguments]
        environment = {**os.environ, **self.environment}
        return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)

    def compose(self, *arguments: str) -> str:
        """Return the standard output of ``docker compose …``. If the command fails, the test fails and shows both
        outputs."""
        return output_of(self.run(*arguments))

    def up(self, *services: str) -> None:
        """Start ``services``. Return when their dependencies are met: models converted, then the server ready."""
        if self.run("up", "--detach", *services).returncode != 0:
            pytest.fail(f"the stack did not come up:\n{self.compose('logs', '--no-color')[-6000:]}")

    def python(self, script: str) -> str:
        """Run ``script`` in a container that may write to the models, and return its standard output."""
        return self.compose("run", "--rm", "-T", "--no-deps", "--entrypoint", "python", "convert", "-c", script)

    def address(self, service: str, port: int) -> str:
        return self.compose("port", service, str(port))

    @property
    def target(self) -> str:
        """The address of the server's gRPC port."""
        return f"127.0.0.1:{self.environment['GRPC_PORT']}"

    def container(self, service: str) -> dict[str, Any]:
        """Return the engine's description of a service's container, including one that has ended."""
        (found,) = json.loads(output_of(docker("inspect", self.compose("ps", "--all", "--quiet", service))))
        assert isinstance(found, dict)
        return found

    def health(self, service: str) -> str:
        return str(self.container(service)["State"]["Health"]["Status"])

    def log(self, service: str) -> str:
        return self.compose("logs", "--no-color", "--no-log-prefix", service)

    def get(self, path: str) -> tuple[int, str]:
        """Return status and text of a page of the server's HTTP port; status 0 if there is no response."""
        return get(f"http://127.0.0.1:{self.environment['HTTP_PORT']}{path}")

    def ask(self, path: str, **parameters: str) -> Any:
        """Return the data of a response of the HTTP API of the stack's Prometheus."""
        url = f"http://127.0.0.1:{self.environment['PROMETHEUS_PORT']}/api/v1/{path}?"
        with urllib.request.urlopen(url + urllib.parse.urlencode(parameters), timeout=10) as reply:
            return json.load(reply)["data"]

    def query(self, promql: str) -> list[float]:
        """Return the values of an instant query, one per series."""
        return [float(series["value"][1]) for series in self.ask("query", query=promql)["result"]]

    def firing(self) -> set[str]:
        """Return the alerts that fire now; none while Prometheus does not respond."""
        try:
            alerts = self.ask("alerts")["alerts"]
        except OSError:
            return set()
        return {alert["labels"]["alertname"] for alert in alerts if alert["state"] == "firing"}

    def down(self) -> None:
        self.compose("down", "--volumes", "--timeout", "10")

    def left(self) -> str:
        """Return the containers, volumes and networks of the project that the engine still has."""
        label = f"label=com.docker.compose.project={self.project}"
        commands = (("ps", "--all"), ("volume", "ls"), ("network", "ls"))
        return "".join(output_of(docker(*command, "--quiet", "--filter", label)) for command in commands)


class Container:
    """A single container of the server's image, hardened like the stack's. It is removed when the block is left."""

    def __init__(self, *arguments: str, options: tuple[str, ...] = ()) -> None:
        hardened = ("--read-only", "--tmpfs", "/tmp:size=256m", "--cap-drop", "ALL", "--pids-limit", "512")
        quick = ("--health-interval", "1s", "--health-start-period", "2s", "--health-retries", "2")
        self.id = output_of(docker("run", "--detach", *hardened, *quick, *options, f"{IMAGE}:server", *arguments))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        docker("rm", "--force", "--volumes", self.id)

    @property
    def state(self) -> dict[str, Any]:
        found = json.loads(output_of(docker("inspect", "--format", "{{json .State}}", self.id)))
        assert isinstance(found, dict)
        return found

    @property
    def health(self) -> str:
        return str(self.state.get("Health", {}).get("Status", "none"))

    @property
    def log(self) -> str:
        done = docker("logs", self.id)
        return done.stdout + done.stderr


def get(url: str) -> tuple[int, str]:
    """Return status and text of a page; status 0 if there is no response."""
    try:
        with urllib.request.urlopen(url, timeout=10) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()
    except OSError as error:
        return 0, str(error)
