"""The memory of a server of MiniLM, with its shadow, and of a further worker, beyond an interpreter with its imports.

The proportional set size counts a page that n processes share as an nth of it: added up over all processes of a server
it is what the server takes, and what one more worker adds is the difference of two servers. Private memory is what no
other process has. All is measured when everybody is idle and free pages have been given back.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import grpc

from bench.core import models
from bench.core.processes import bf16_serve
from bench.core.results import Measurement, Result
from bench.core.workspace import Workspace
from bench.serving import wire

_AT_MOST_MB, _WITH_SHADOW_AT_MOST_MB = 60, 200
_WORKERS = 2, 3
_SERVING = "shadow:\n  rate: 0\n"  # its reference is one for all workers
_CONNECTIONS, _REQUESTS = 12, 8
_IDLE_S = 6.0  # until what requests took is given back
_REPEATS, _QUICK_REPEATS = 3, 1
_MB = 1e6
# What a worker has imported when it has loaded a model.
_IMPORTS = "import sys, service.workers.worker, service.grpc.transport, bf16kit.runtime.ort.onnx"


@dataclass(frozen=True, slots=True)
class _Memory:
    """Of some processes, in bytes."""

    proportional: int
    private: int
    shared: int  # memory that is neither private nor of a file: the weights


def measure(workspace: Workspace, *, quick: bool) -> Result:
    """Servers of two and of three workers, in turn with as many interpreters that import and do nothing."""
    repeats = _QUICK_REPEATS if quick else _REPEATS
    log = workspace.root / "workers_memory.log"
    minilm = workspace.repository("workers_memory_minilm", workspace.minilm(), _SERVING)
    small = workspace.repository("workers_memory_mlp", workspace.mlp(), _SERVING)
    minilm_request = wire.infer_request("minilm", models.minilm_feeds(1))
    little = wire.infer_request("mlp", models.mlp_feeds(1))
    measured = workspace.repository("workers_memory_measured", workspace.minilm(), "")
    with_shadow = list[_Memory]()
    further = {name: list[_Memory]() for name in ("imports", "mlp", "minilm")}
    weights = list[int]()
    for _ in range(repeats):
        further["imports"].append(_difference([_imports(count) for count in _WORKERS]))
        further["mlp"].append(_difference([_server(small, log, count, little) for count in _WORKERS]))
        found = [_server(minilm, log, count, minilm_request) for count in _WORKERS]
        further["minilm"].append(_difference(found))
        weights.append(found[-1].shared)
        with_shadow.append(_server(measured, log, 1, minilm_request))
    return Result(
        "workers_memory",
        list(_measurements(further, weights, with_shadow)),
        settings={
            "server": f"bf16-serve --workers {_WORKERS[1]} less --workers {_WORKERS[0]}, no shadow, each asked"
            f" {_CONNECTIONS * _REQUESTS} times over {_CONNECTIONS} connections, then idle for {_IDLE_S:g} s;"
            " with its shadow: --workers 1 at the defaults",
            "repeats": repeats,
        },
        notes=("imports: a process that imports what a worker does, and waits",),
    )


def _measurements(
    further: dict[str, list[_Memory]], weights: list[int], with_shadow: list[_Memory]
) -> Iterator[Measurement]:
    total = median(each.proportional for each in with_shadow) / _MB
    yield Measurement(
        "a server with MiniLM and its shadow, between two runs of its reference",
        total,
        "MB",
        at_most=_WITH_SHADOW_AT_MOST_MB,
    )
    proportional = {name: median(each.proportional for each in found) / _MB for name, found in further.items()}
    beyond = proportional["minilm"] - proportional["imports"]
    yield Measurement("a further worker with MiniLM, beyond its imports", beyond, "MB", at_most=_AT_MOST_MB)
    labels = {"imports": "imports alone", "mlp": "a worker with a small MLP", "minilm": "a worker with MiniLM"}
    for name, found in further.items():
        yield Measurement(f"a further process, {labels[name]}: proportional", proportional[name], "MB")
        private = median(each.private for each in found) / _MB
        yield Measurement(f"a further process, {labels[name]}: private", private, "MB")
    yield Measurement("weights that all workers share", median(weights) / _MB, "MB")


def _difference(found: list[_Memory]) -> _Memory:
    fewer, more = found
    return _Memory(more.proportional - fewer.proportional, more.private - fewer.private, more.shared - fewer.shared)


def _server(repository: Path, log: Path, workers: int, request: bytes) -> _Memory:
    with bf16_serve(repository, log, "--workers", str(workers)) as server:
        _ask(server.port, request)
        time.sleep(_IDLE_S)
        return _memory(_process_tree(server.process.pid))


def _ask(port: int, request: bytes) -> None:
    """Over one connection after the other: each goes to whichever worker the system likes."""
    for _ in range(_CONNECTIONS):
        with grpc.insecure_channel(f"127.0.0.1:{port}", [("grpc.use_local_subchannel_pool", 1)]) as channel:
            infer: grpc.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary(wire.INFER)
            for _ in range(_REQUESTS):
                infer(request, timeout=60)


def _imports(count: int) -> _Memory:
    with ExitStack() as stack:
        return _memory([stack.enter_context(_importing()) for _ in range(count)])


@contextmanager
def _importing() -> Iterator[int]:
    """A process that has imported everything."""
    command = [sys.executable, "-c", f"{_IMPORTS}; print(flush=True); sys.stdin.read()"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=models.ROOT) as process:
        assert process.stdout is not None
        assert process.stdout.readline()
        yield process.pid
        process.communicate()  # the end of its input ends it


def _process_tree(pid: int) -> list[int]:
    """A process and its descendants."""
    children = Path(f"/proc/{pid}/task").glob("*/children")
    return [
        pid,
        *(each for file in children for child in file.read_text().split() for each in _process_tree(int(child))),
    ]


def _memory(pids: list[int]) -> _Memory:
    each = [_fields(pid) for pid in pids]
    proportional, private = (sum(found[name] for found in each) for name in ("Pss", "Private"))
    return _Memory(proportional, private, sum(found["Pss_Shmem"] for found in each))


def _fields(pid: int) -> dict[str, int]:
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]
    fields = {line.split(":")[0]: int(line.split()[1]) * 1024 for line in lines}
    return fields | {"Private": fields["Private_Clean"] + fields["Private_Dirty"]}
