"""The servers that are compared: each at its defaults, and as it was seen to be fastest."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.core.processes import Server, bf16_serve, peer_server
from bench.core.workspace import Workspace
from bench.peers import environments

_HERE = Path(__file__).parent
_SPINNING_OFF = {"threads": 1}  # one thread for a run of a small model, and no busy waiting
OURS, OURS_WORKERS = "bf16-serve", "bf16-serve, 2 workers"


@dataclass(frozen=True, slots=True)
class Case:
    """A model under ``name``: its fp32 ONNX file, which the peers serve, and the artifact made of it, which we do."""

    name: str
    graph: Path
    artifact: Path


@dataclass(frozen=True, slots=True)
class Contender:
    """One way to serve a case. ``settings`` are those that are not defaults, for people."""

    name: str
    settings: str
    start: Callable[[], AbstractContextManager[Server]]


def contenders(workspace: Workspace, case: Case) -> list[Contender]:
    """Ours first. Raises RuntimeError where a peer cannot be installed."""
    root = workspace.root / f"peers-{case.name}"
    shutil.rmtree(root, ignore_errors=True)
    root.mkdir(parents=True)
    repository = workspace.repository(f"peers-{case.name}/ours", case.artifact)

    def ours(name: str, *flags: str) -> Contender:
        log = root / f"{name}.log".replace(" ", "-")
        return Contender(name, " ".join(flags), lambda: bf16_serve(repository, log, *flags))

    return [
        ours(OURS),
        ours(OURS_WORKERS, "--workers", "2"),
        _mlserver(root, case, "MLServer", {}, {}),
        _mlserver(root, case, "MLServer at its best", {"parallel_workers": 0}, _SPINNING_OFF),
        _pytriton(root, case, "PyTriton", {}),
        _pytriton(root, case, "PyTriton at its best", {**_SPINNING_OFF, "instances": 2}),
    ]


def _mlserver(root: Path, case: Case, name: str, settings: Mapping[str, Any], extra: Mapping[str, Any]) -> Contender:
    directory = root / name.replace(" ", "-")

    @contextmanager
    def start() -> Iterator[Server]:
        def command(ports: list[int]) -> list[str]:
            (directory / case.name).mkdir(parents=True, exist_ok=True)
            model = {
                "name": case.name,
                "implementation": "mlserver_onnx.OnnxModel",
                "parameters": {"uri": str(case.graph), "extra": dict(extra)},
            }
            (directory / case.name / "model-settings.json").write_text(json.dumps(model), "utf-8")
            listening = dict(zip(("grpc_port", "http_port", "metrics_port"), ports, strict=True))
            (directory / "settings.json").write_text(
                json.dumps({"host": "127.0.0.1", **listening, **settings}), "utf-8"
            )
            return [str(environments.interpreter("mlserver").with_name("mlserver")), "start", str(directory)]

        environment = {**os.environ, "PYTHONPATH": str(_HERE)}
        with peer_server(command, directory.with_suffix(".log"), environment, case.name) as server:
            yield server

    return Contender(name, _words({**settings, **extra}), start)


def _pytriton(root: Path, case: Case, name: str, how: Mapping[str, Any]) -> Contender:
    def command(ports: list[int]) -> list[str]:
        python = str(environments.interpreter("pytriton"))
        script = str(_HERE / "pytriton_onnx.py")
        return [python, script, str(case.graph), case.name, *map(str, ports), json.dumps(how)]

    log = root / f"{name.replace(' ', '-')}.log"
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    return Contender(name, _words(how), lambda: peer_server(command, log, environment, case.name))


def _words(settings: Mapping[str, Any]) -> str:
    return ", ".join(f"{key} {value}" for key, value in settings.items())
