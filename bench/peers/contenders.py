"""The servers that are compared: each at its defaults, and as it was seen to be fastest."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from bench.core.processes import Server, bf16_serve, peer_server
from bench.core.workspace import Workspace
from bench.peers import environments

_HERE = Path(__file__).parent
_MODEL = "mlp"
_SPINNING_OFF = {"threads": 1}  # one thread for a run of a small model, and no busy waiting
OURS, OURS_WORKERS = "bf16-serve", "bf16-serve, 2 workers"


@dataclass(frozen=True, slots=True)
class Contender:
    """One way to serve the model. ``settings`` are those that are not defaults, for people."""

    name: str
    settings: str
    start: Callable[[], AbstractContextManager[Server]]


def contenders(workspace: Workspace) -> list[Contender]:
    """Ours first. The peers serve the fp32 ONNX file that our artifact is made of."""
    root, artifact = workspace.root / "peers", workspace.mlp()
    shutil.rmtree(root, ignore_errors=True)
    root.mkdir(parents=True)
    repository, graph = workspace.repository("peers/ours", artifact), workspace.root / "mlp.onnx"

    def ours(name: str, *flags: str) -> Contender:
        return Contender(name, " ".join(flags), lambda: bf16_serve(repository, root / f"{name}.log", *flags))

    return [
        ours(OURS),
        ours(OURS_WORKERS, "--workers", "2"),
        _mlserver(root, graph, "MLServer", {}, {}),
        _mlserver(root, graph, "MLServer at its best", {"parallel_workers": 0}, _SPINNING_OFF),
        _pytriton(root, graph, "PyTriton", {}),
        _pytriton(root, graph, "PyTriton at its best", {**_SPINNING_OFF, "instances": 2}),
    ]


def _mlserver(root: Path, graph: Path, name: str, settings: Mapping[str, Any], extra: Mapping[str, Any]) -> Contender:
    directory = root / name
    (directory / _MODEL).mkdir(parents=True)
    parameters = {"uri": str(graph), "extra": dict(extra)}
    model = {"name": _MODEL, "implementation": "mlserver_onnx.OnnxModel", "parameters": parameters}
    (directory / _MODEL / "model-settings.json").write_text(json.dumps(model), "utf-8")

    def command(ports: list[int]) -> list[str]:
        listening = dict(zip(("grpc_port", "http_port", "metrics_port"), ports, strict=True))
        (directory / "settings.json").write_text(json.dumps({"host": "127.0.0.1", **listening, **settings}), "utf-8")
        return [str(environments.interpreter("mlserver").with_name("mlserver")), "start", str(directory)]

    environment = {**os.environ, "PYTHONPATH": str(_HERE)}
    start = partial(peer_server, command, directory.with_suffix(".log"), environment, _MODEL)
    return Contender(name, _words({**settings, **extra}), start)


def _pytriton(root: Path, graph: Path, name: str, how: Mapping[str, Any]) -> Contender:
    def command(ports: list[int]) -> list[str]:
        python, script = str(environments.interpreter("pytriton")), str(_HERE / "pytriton_onnx.py")
        return [python, script, str(graph), _MODEL, *map(str, ports), json.dumps(how)]

    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    return Contender(name, _words(how), partial(peer_server, command, root / f"{name}.log", environment, _MODEL))


def _words(settings: Mapping[str, Any]) -> str:
    return ", ".join(f"{key} {value}" for key, value in settings.items())
