"""bf16 against fp32 and TF32 on a GPU: rows per second of MiniLM and of an MLP, in ONNX Runtime and in TorchScript.

Skips with the reason where no CUDA device works. The inputs come from host memory and the outputs go back there, as in
the server. bf16 is the artifact as the server would load it; fp32 and TF32 are the checkpoint itself.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING, Any

from numpy.typing import NDArray

from bench.core import models
from bench.core.results import Measurement, Result
from bench.core.verdict import FEWEST_PROCESSES, Samples, ratio, typical
from bench.core.workspace import BOTH_FORMATS, Workspace
from bf16kit.artifact.artifact import Artifact
from bf16kit.messages.errors import RuntimeFailure
from bf16kit.runtime.loading import load
from bf16kit.runtime.ort.onnxgraph import REBUILT, locations

if TYPE_CHECKING:
    import torch

_DEVICE = "cuda:0"
_BATCHES = (1, 8, 64, 256)
_WARM_UP_RUNS = 10
_SECONDS, _QUICK_SECONDS = 0.5, 0.1

_PRECISIONS = ("fp32", "tf32", "bf16")

Case = tuple[str, str, str, int]  # model, backend, precision, rows
Feeds = dict[str, NDArray[Any]]
Run = Callable[[Feeds], object]


@dataclass(frozen=True, slots=True)
class Subject:
    """One model to measure: its artifact, the fp32 module it came from, and feeds of any number of rows."""

    name: str
    artifact: Artifact
    module: Callable[[], torch.nn.Module]
    feeds: Callable[[int], Feeds]


def measure(workspace: Workspace, *, quick: bool) -> Result:
    """Throughput of each model, backend, precision and batch size that this machine can run, and ratios of bf16."""
    missing = {name: reason for name in _BACKENDS if (reason := _missing(name))}
    backends = [name for name in _BACKENDS if name not in missing]
    if not backends:
        return Result("gpu", skipped="; ".join(missing.values()))
    _subjects(workspace)  # converts, once
    seconds, rounds = (_QUICK_SECONDS, 1) if quick else (_SECONDS, FEWEST_PROCESSES)
    # A process' memory layout and the GPU's clocks differ from the next one's, so each round has its own.
    with ProcessPoolExecutor(1, get_context("spawn"), max_tasks_per_child=1) as pool:
        process = partial(_seconds_per_row, workspace.root, backends, seconds)
        found = [pool.submit(process, number).result() for number in range(rounds)]
    taken = {case: [process[case] for process in found] for case in found[0]}
    return Result(
        "gpu",
        list(_judged(taken)),
        settings={
            "device": _device_name(),
            "batches": list(_BATCHES),
            "tokens": models.TOKENS,
            "seconds": seconds,
            "processes": rounds,
        },
        notes=[*missing.values(), "inputs come from host memory and outputs go back there"],
    )


def _judged(taken: Mapping[Case, Samples]) -> Iterator[Measurement]:
    for case, samples in sorted(taken.items()):
        model, backend, precision, rows = case
        yield Measurement(f"{model} {backend} {precision} batch {rows}", 1 / typical(samples), "rows/s")
        if precision != "bf16":
            found = ratio(samples, taken[model, backend, "bf16", rows])
            yield Measurement.of(f"{model} {backend} batch {rows}: bf16 ÷ {precision}, rows per second", found)


def _seconds_per_row(root: Path, backends: Sequence[str], seconds: float, number: int) -> dict[Case, list[list[float]]]:
    """Process ``number``: for each case one turn of one value, the mean time of a row.

    The first precision is another one in each process: a GPU gets warm, and its clocks fall.
    """
    taken = {}
    first = number % len(_PRECISIONS)
    for subject in _subjects(Workspace(root)):
        for backend in backends:
            for precision in (*_PRECISIONS[first:], *_PRECISIONS[:first]):
                with _BACKENDS[backend](subject, precision) as run:
                    for rows in _BATCHES:
                        rate = _rate(run, subject.feeds(rows), seconds) * rows
                        taken[subject.name, backend, precision, rows] = [[1 / rate]]
    return taken


def _rate(run: Run, feeds: Feeds, seconds: float) -> float:
    """Runs per second. A run has ended when its outputs are in host memory, so the clock needs no other fence."""
    for _ in range(_WARM_UP_RUNS):
        run(feeds)
    runs, started = 0, time.perf_counter()
    while (elapsed := time.perf_counter() - started) < seconds:
        run(feeds)
        runs += 1
    return runs / elapsed


# --- backends ---------------------------------------------------------------------------------------------------------


@contextmanager
def _onnx(subject: Subject, precision: str) -> Iterator[Run]:
    """cuda.onnx through the server's runtime, or the reference's graph in a session that may use TF32 or not."""
    if precision == "bf16":
        runtime = load(subject.artifact, "cuda", device=_DEVICE)
        yield runtime.run
        runtime.close()
        return
    session = _reference_session(subject.artifact, tf32=precision == "tf32")
    yield lambda feeds: session.run(None, feeds)


def _reference_session(artifact: Artifact, *, tf32: bool) -> Any:
    """reference.onnx on CUDA. Opened here because the kit never allows TF32."""
    import onnx
    import onnxruntime as ort

    graph = artifact.path / str(artifact.manifest.reference)
    tensors = onnx.load(graph, load_external_data=False).graph.initializer
    weights = {tensor.name: artifact.restore(tensor.name) for tensor in tensors if REBUILT in locations(tensor)}
    options = ort.SessionOptions()
    options.add_external_initializers(
        list(weights), [ort.OrtValue.ortvalue_from_numpy(weight) for weight in weights.values()]
    )
    provider = ("CUDAExecutionProvider", {"use_tf32": str(int(tf32))})
    return ort.InferenceSession(graph, options, providers=[provider, "CPUExecutionProvider"], enable_fallback=0)


@contextmanager
def _torchscript(subject: Subject, precision: str) -> Iterator[Run]:
    """The artifact's module, or the fp32 module traced as it is, both through the server's runtime."""
    import torch

    from bf16kit.runtime.torchruntimes import TorchScriptRuntime

    if precision == "bf16":
        runtime = load(subject.artifact, "torchscript", device=_DEVICE)
    else:
        file = _trace(subject)
        specs = subject.artifact.manifest
        inputs, outputs = [entry.spec() for entry in specs.inputs], [entry.spec() for entry in specs.outputs]
        runtime = TorchScriptRuntime(file, inputs, outputs, device=_DEVICE)
    torch.backends.cuda.matmul.allow_tf32 = precision == "tf32"  # after loading, which turns it off
    try:
        yield runtime.run
    finally:
        torch.backends.cuda.matmul.allow_tf32 = False
        runtime.close()


def _trace(subject: Subject) -> Path:
    """The fp32 module as a TorchScript file beside the artifact's directory."""
    import torch

    from bf16kit.converter.process.quiet import quiet
    from bf16kit.converter.read.onnx_export import adapt

    file = subject.artifact.path.parent / "fp32.torchscript.pt"
    if file.exists():
        return file
    with quiet(), torch.no_grad():
        model = adapt(subject.module(), [entry.spec() for entry in subject.artifact.manifest.inputs])
        torch.jit.trace(model.module, model.example, check_trace=False).save(str(file))
    return file


Opener = Callable[[Subject, str], Any]
_BACKENDS: Mapping[str, Opener] = {"onnx": _onnx, "torchscript": _torchscript}


def _missing(backend: str) -> str:
    """Why ``backend`` cannot run on a GPU here; empty when it can."""
    return _onnx_missing() if backend == "onnx" else _torch_missing()


def _onnx_missing() -> str:
    from bf16kit.runtime.probe import probe_onnx

    try:
        probe_onnx(_DEVICE, "bf16")
    except RuntimeFailure as failure:
        return str(failure)
    return ""


def _torch_missing() -> str:
    if find_spec("torch") is None:
        return "torch is not installed"
    import torch

    return "" if torch.cuda.is_available() else f"torch {torch.__version__} sees no CUDA device"


def _device_name() -> str:
    import torch

    return torch.cuda.get_device_name(0) if torch.cuda.is_available() else _DEVICE


# --- models -----------------------------------------------------------------------------------------------------------


def _subjects(workspace: Workspace) -> list[Subject]:
    from bench.gpu import torch_mlp

    workspace.root.mkdir(parents=True, exist_ok=True)
    source, width = torch_mlp.save(workspace.root / "torch_mlp.pt"), torch_mlp.WIDTHS[0]
    build = ("--model", "bench.gpu.torch_mlp:mlp", "--input", f"x:float32:batch,{width}")
    return [
        Subject(
            "MiniLM",
            Artifact.open(workspace.minilm(*BOTH_FORMATS, name="scripted_minilm")),
            _minilm_module,
            models.minilm_feeds,
        ),
        Subject(
            "MLP",
            Artifact.open(workspace.converted("scripted_torch_mlp", source, *build, *BOTH_FORMATS)),
            torch_mlp.mlp,
            lambda rows: models.mlp_feeds(rows, width),
        ),
    ]


def _minilm_module() -> torch.nn.Module:
    import minilm
    from transformers import AutoModel

    module: torch.nn.Module = AutoModel.from_pretrained(minilm.checkpoint())
    return module
