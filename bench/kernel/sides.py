"""Who is measured beside the CPU kernel: ONNX Runtime in fp32, torch in bf16, OpenVINO. One model, equal threads.

A side is prepared for one set of feeds, then run again and again without arguments. What is not installed, or what this
processor cannot run, says why and has no times.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from bench.core.interleave import Run
from bf16kit.artifact import Artifact
from bf16kit.errors import ConfigError
from bf16kit.runtime.hardware import available_cpus
from bf16kit.runtime.kernel import VARIABLE
from bf16kit.runtime.loading import load
from bf16kit.runtime.session import open_session

if TYPE_CHECKING:
    import torch

Feeds = Mapping[str, NDArray[Any]]
THREADS = available_cpus()
FP32 = "ONNX Runtime fp32"
PATHS = ("avx512f", "avx2")
SETTINGS = {
    "threads": THREADS,
    "busy_waiting": "off for ONNX Runtime, ours and fp32 alike, as the server opens its sessions",
    "onnxruntime": "all graph optimisations on, both sides, one process; runs take turns, in an order drawn each round",
    "rounds": "medians; peers more than 3 times slower than the fastest take part in fewer rounds, but in 10 at least",
    "torch": "torch.inference_mode, as many threads",
    "openvino": "LATENCY, one stream, as many threads, from weights stored in bf16; both precisions of arithmetic,"
    " bf16 being its own choice where the processor has such instructions",
}


@dataclass(frozen=True, slots=True)
class Side:
    """``prepare`` makes the run for given feeds; without it, ``absent`` says why. ``lingers``: its threads wait busily
    after a run."""

    name: str
    prepare: Callable[[Feeds], Run] | None = None
    absent: str = ""
    lingers: bool = False


def onnxruntime_fp32(graph: Path) -> Side:
    """``graph`` as it is, in a session with the options of ours."""
    session = open_session(graph, threads=THREADS)

    def prepare(feeds: Feeds) -> Run:
        given = dict(feeds)
        return lambda: session.run(None, given)

    return Side(FP32, prepare)


def ours(artifact: Path, path: str = "") -> Side:
    """The cpu profile on the kernel's ``path``; without one, on the path the kernel chooses."""
    name = f"ours, {path or 'whichever path'}"
    with _kernel_path(path):
        try:
            runtime = load(Artifact.open(artifact, verify=False), "cpu", threads=THREADS)
        except ConfigError as error:
            return Side(name, absent=str(error))
    if not runtime.info.kernel:
        return Side(name, absent=runtime.info.note or "no node of this graph runs on the kernel")
    assert path in ("", runtime.info.kernel), runtime.info

    def prepare(feeds: Feeds) -> Run:
        return lambda: runtime.run(feeds)

    return Side(f"ours, {runtime.info.kernel}", prepare)


def ours_by_path(artifact: Path) -> tuple[Side, ...]:
    """Every path worth timing; what the kernel chooses where none of these runs. The first that does is what users
    get."""
    named = tuple(ours(artifact, path) for path in PATHS)
    return named if any(side.prepare for side in named) else (*named, ours(artifact))


def torch_module(module: torch.nn.Module, dtype: torch.dtype) -> Side:
    """``module``, turned to ``dtype`` in place. It takes its inputs by name, or the only one by position."""
    import torch

    torch.set_num_threads(THREADS)
    module = module.to(dtype).eval()

    def prepare(feeds: Feeds) -> Run:
        tensors = {name: _tensor(array, dtype) for name, array in feeds.items()}
        arguments, named = (list(tensors.values()), {}) if len(tensors) == 1 else ([], tensors)

        def run() -> object:
            with torch.inference_mode():
                return module(*arguments, **named)

        return run

    return Side(f"torch {'bf16' if dtype is torch.bfloat16 else 'fp32'}", prepare, lingers=True)


def _tensor(array: NDArray[Any], dtype: torch.dtype) -> torch.Tensor:
    import torch

    tensor = torch.from_numpy(array)
    return tensor.to(dtype) if tensor.is_floating_point() else tensor


def openvino(graph: Path) -> tuple[Side, ...]:
    """``graph`` compiled by OpenVINO for arithmetic in fp32, and in bf16 where the processor has it."""
    names = {"f32": "OpenVINO fp32", "bf16": "OpenVINO bf16"}
    return tuple(guarded(name, partial(_openvino, graph, precision)) for precision, name in names.items())


def _openvino(graph: Path, precision: str) -> Side:
    if find_spec("openvino") is None:
        return Side("", absent="OpenVINO is not installed: pip install '.[bench]'")
    core = import_module("openvino").Core()  # by name: it has no types
    if precision == "bf16" and "BF16" not in core.get_property("CPU", "OPTIMIZATION_CAPABILITIES"):
        return Side("", absent="OpenVINO finds no bf16 instructions here")
    options = {
        "PERFORMANCE_HINT": "LATENCY",
        "NUM_STREAMS": "1",
        "INFERENCE_NUM_THREADS": str(THREADS),
        "INFERENCE_PRECISION_HINT": precision,
        "ENABLE_CPU_PINNING": "NO",  # it would pin the thread that the other sides are run from
    }
    request = core.compile_model(str(graph), "CPU", options).create_infer_request()
    return Side("", _openvino_runs(request), lingers=True)


def _openvino_runs(request: Any) -> Callable[[Feeds], Run]:
    def prepare(feeds: Feeds) -> Run:
        given = dict(feeds)
        return lambda: request.infer(given, share_inputs=True, share_outputs=True)

    return prepare


def guarded(name: str, make: Callable[[], Side]) -> Side:
    """What ``make`` makes; a peer that cannot be prepared is absent with its reason, and does not end the benchmark."""
    try:
        return replace(make(), name=name)
    except Exception as error:  # noqa: BLE001 - other people's programs raise what they like
        return Side(name, absent=first_line(error))


def first_output(run: Run) -> NDArray[np.float64]:
    """What ``run`` returns first, whichever side it is of."""
    result: Any = run()
    result = getattr(result, "last_hidden_state", result)  # transformers' outputs
    if not hasattr(result, "shape"):
        result = next(iter(result.values())) if hasattr(result, "values") else next(iter(result))
    if hasattr(result, "float"):
        result = result.float().numpy()
    return np.asarray(result, np.float64)


def first_line(error: Exception) -> str:
    """What ``error`` says, for a note."""
    return (str(error).strip() or type(error).__name__).splitlines()[0][:200]


@contextmanager
def _kernel_path(path: str) -> Iterator[None]:
    """The environment asks for ``path`` of the kernel meanwhile; for "" it asks for nothing."""
    before = os.environ.pop(VARIABLE, None)
    if path:
        os.environ[VARIABLE] = path
    try:
        yield
    finally:
        os.environ.pop(VARIABLE, None)
        if before is not None:
            os.environ[VARIABLE] = before
