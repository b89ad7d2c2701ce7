"""Tries an ONNX file in a child process: ONNX's checker, a session of ONNX Runtime, and one run on small inputs.

Both libraries are C++ programs that trust what they read: a graph can end their process, take all memory, or never end.
So they meet it first where time and memory are limited, and a failure becomes one sentence.
"""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from bf16kit.converter.process import program
from bf16kit.messages.errors import ConversionError, RuntimeFailure, SourceError
from bf16kit.messages.wording import brief
from bf16kit.system import controlgroup
from bf16kit.system.exit_with_parent import exit_with_parent

SECONDS = 600  # of processor time, which a busy machine or a slow disk does not change; large models take a minute
_SIZES = (1, 2, 32, 64, 224)  # of the free dimensions behind the first, until the graph runs
# ONNX Runtime sorts nodes itself, and this program, too. A wrong declared shape is replaced by what running shows.
_TOLERATED = ("must be topologically sorted", "Inferred shape and existing shape differ")
_NO_MEMORY = ("bad_alloc", "allocate memory")  # in ONNX Runtime's errors, which have no class for it
_NO_SIZE = ("Integer overflow", "size overflowed")  # the same: of a size in bytes
_INFERENCE = 512 << 20  # bytes
_MOST_DIMENSIONS = 64  # of numpy's arrays
_LARGE = 1000  # bytes of a tensor that tells no sizes
_STATUS = Path("/proc/self/status")
_INVALID, _UNUSABLE = 2, 3  # exit codes


def check(path: Path) -> None:
    """Raise an error if the ONNX file at ``path`` cannot be trusted here.

    :class:`SourceError` if the file breaks ONNX's rules; :class:`ConversionError` if ONNX Runtime cannot open it, or
    if that or a run crashes, needs more memory than there is, or does not end. A run may fail otherwise: the small
    inputs may not fit.
    """
    command = program.command(__name__, str(path), str(SECONDS), str(os.getpid()))
    done = subprocess.run(command, env=program.environment(), capture_output=True, check=False)
    if done.returncode == 0:
        return
    reason = done.stdout.decode(errors="replace").strip()
    if done.returncode == _INVALID:
        raise SourceError(f"{path}: damaged: {reason}")
    if done.returncode == _UNUSABLE:
        raise ConversionError(f"{path}: {reason}")
    if done.returncode == -signal.SIGXCPU:
        raise ConversionError(
            f"{path}: ONNX Runtime did not open it and run it once on small inputs within {SECONDS} s of processor"
            " time, and was stopped; a Loop that never ends?"
        )
    ended = signal.Signals(-done.returncode).name if done.returncode < 0 else f"exit code {done.returncode}"
    memory = " (out of memory?)" if -done.returncode in (signal.SIGKILL, signal.SIGABRT) else ""
    raise ConversionError(f"{path}: crashes ONNX Runtime: its process ended with {ended}{memory}")


def main() -> None:
    """Try the file that the first argument names, within the seconds of the second, for the parent of the third."""
    path, seconds, parent = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    exit_with_parent(parent)
    controlgroup.maximize_oom_score()
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    hard = resource.getrlimit(resource.RLIMIT_CPU)[1]
    resource.setrlimit(resource.RLIMIT_CPU, (seconds if hard < 0 else min(seconds, hard), hard))
    memory = _limit_memory()
    try:
        _check_rules(path)
        _open_and_run(path, _check_sizes(path))
    except SourceError as error:
        _end(_INVALID, str(error))
    except RuntimeFailure as error:
        _end(_UNUSABLE, str(error))
    except MemoryError:
        _end(_UNUSABLE, f"takes more than the {memory / 1e9:.1f} GB of memory that are here")
    _end(0, "")  # at once: to clean up takes a sixth of this process's time


def _end(code: int, text: str) -> None:
    os.write(1, text.encode(errors="replace"))
    os._exit(code)


def _limit_memory() -> int:
    """Limit the memory of this process to that of the machine or container, in bytes, and return it.

    RLIMIT_DATA counts what is allocated. RLIMIT_AS would also count mapped weights and reserved addresses.
    """
    machine = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    container = controlgroup.memory()
    inherited, hard = resource.getrlimit(resource.RLIMIT_DATA)
    limits = [machine, *([container.limit] if container else []), *([inherited] if inherited >= 0 else [])]
    resource.setrlimit(resource.RLIMIT_DATA, (min(limits), hard))
    return min(limits)


def _check_rules(path: Path) -> None:
    """Raise :class:`SourceError` for the first rule of ONNX that the file breaks, shapes and types included."""
    import onnx

    try:
        onnx.checker.check_model(path, full_check=True)
    except MemoryError:
        raise
    except Exception as error:  # several kinds, some of them only in C++
        text = " ".join(str(error).replace("==> Context:", "").split())
        if not any(tolerated in text for tolerated in _TOLERATED):
            raise SourceError(brief(text)) from error


def _check_sizes(path: Path) -> Any:
    """Infer shapes as the conversion will, in :data:`_INFERENCE` of memory; RuntimeFailure if that is too little.

    Returns the graph, without weights.

    ONNX's inference also computes sizes from constants: each Concat may double their number, and a Reshape makes a
    dimension of each. Without weights, a model takes some megabytes.
    """
    import onnx.inliner

    model = onnx.load(path, load_external_data=False)
    for graph in _graphs((model.graph, *model.functions)):
        constants = (each for node in graph.node for of in node.attribute for each in (of.t, *of.tensors))
        for tensor in (*getattr(graph, "initializer", ()), *constants):
            if tensor.ByteSize() > _LARGE:
                tensor.CopyFrom(onnx.TensorProto(name=tensor.name, data_type=tensor.data_type, dims=tensor.dims))
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    if _STATUS.exists():  # on Linux
        used = int(_STATUS.read_text(encoding="ascii", errors="replace").partition("VmData:")[2].split()[0]) << 10
        resource.setrlimit(resource.RLIMIT_DATA, (min(soft, used + _INFERENCE), hard))
    try:
        model = onnx.inliner.inline_local_functions(model) if model.functions else model
        graphs = [onnx.shape_inference.infer_shapes(model, data_prop=True).graph]
    except MemoryError:
        most = f"{_INFERENCE >> 20} MiB of memory"
        raise RuntimeFailure(f"inferring its shapes takes more than {most}: are its constant sizes damaged?") from None
    except Exception:  # noqa: BLE001 - the conversion goes on without what cannot be inferred
        graphs = []
    resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))
    for graph in _graphs(graphs):
        for value in (*graph.value_info, *graph.output):
            rank = len(value.type.tensor_type.shape.dim)
            if rank > _MOST_DIMENSIONS:
                most = f"arrays have {_MOST_DIMENSIONS} at most"
                raise RuntimeFailure(f"tensor {value.name!r} has {rank} dimensions, and {most}")
    return model


def _graphs(graphs: Iterable[Any]) -> Iterator[Any]:
    """Yield ``graphs``, which may be functions, and the graphs inside."""
    for graph in graphs:
        yield graph
        for attribute in (attribute for node in graph.node for attribute in node.attribute):
            yield from _graphs((attribute.g, *attribute.graphs))


def _open_and_run(path: Path, graph: Any) -> None:
    """Open a session and run it once; MemoryError if either needs too much memory, RuntimeFailure if it cannot open."""
    from bf16kit.runtime.ort.emptytensors import EmptyTensors
    from bf16kit.runtime.ort.kernel import NOT_NEEDED
    from bf16kit.runtime.ort.session import open_session

    try:
        # One thread: ONNX Runtime waits forever for those that the limit on memory does not allow.
        session = open_session(path, threads=1, pack=False)
    except RuntimeFailure as error:
        _check_memory(error, (*_NO_MEMORY, *_NO_SIZE))  # releases that compute constants here know their sizes
        raise
    overflow, empty = "", EmptyTensors(graph, NOT_NEEDED)
    for feeds in _feeds(session):
        try:
            empty.check(feeds)
            session.run(None, feeds)
            return
        except Exception as error:  # noqa: BLE001 - mostly the sizes, which do not fit
            _check_memory(error)
            overflow = overflow or (str(error) if any(text in str(error) for text in _NO_SIZE) else "")
    if overflow:
        raise MemoryError(overflow)


def _check_memory(error: Exception, texts: Sequence[str] = _NO_MEMORY) -> None:
    if any(text in str(error) for text in texts):
        raise MemoryError from error


def _feeds(session: Any) -> Iterator[dict[str, Any]]:
    """Yield ones for every input, of several sizes; nothing for inputs that numpy cannot make."""
    import numpy as np

    def ones(edge: Any, size: int) -> Any:
        known = [dim if isinstance(dim, int) and dim > 0 else 0 for dim in edge.shape]
        shape = [dim or (size if axis else 1) for axis, dim in enumerate(known)]
        name = edge.type.removeprefix("tensor(").removesuffix(")")
        return np.ones(shape, {"float": "float32", "double": "float64"}.get(name, name))

    for size in _SIZES:
        try:
            yield {edge.name: ones(edge, size) for edge in session.get_inputs()}
        except (TypeError, ValueError, MemoryError):
            return


if __name__ == "__main__":
    main()
