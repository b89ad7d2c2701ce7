"""Opening an ONNX Runtime session: its options, its device, and its errors as ours.

All settings are the same for all models, so that the server runs what the converter verified: no TF32, no reduced
accumulation, no text on the terminal (errors are exceptions, and the log is ours).
"""

from __future__ import annotations

import contextlib
import ctypes
import io
import os
import re
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from bf16kit.messages.errors import DeviceUnavailable, RuntimeFailure
from bf16kit.messages.wording import brief
from bf16kit.numerics.tensors import BY_NAME
from bf16kit.runtime import CPU, Array, available_cpus
from bf16kit.system import is_older

# Builds from 1.31 on write a device id and a database of events under ~/.cache on import, unless the environment
# forbids it. To allow it, set ORT_DISABLE_TELEMETRY=0. The whole project imports ONNX Runtime from here.
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")
import onnxruntime as ort

__all__ = ["ort"]

Session: TypeAlias = Any  # onnxruntime.InferenceSession: the package has no types

_CUDA_PROVIDER = "CUDAExecutionProvider"
_CPU_PROVIDER = "CPUExecutionProvider"
_FATAL = 4
_LONGEST = 2000  # bytes of a list of operators, well below what an entry of the configuration holds, 4,096
_DRIVER = "libcuda.so.1"
_CHECK = "check that nvidia-smi lists a device here (in a container: docker run --gpus all)"
# CUDA's codes for a driver that is a stub or too old, no device, no such device, and a device that cannot be used.
_NO_DEVICE = re.compile(r"CUDA failure (?:3[45]|46|10[01]|80[0-4]): ([^;]*[^; ])")

_CUDA_OPTIONS = {
    "use_tf32": "0",  # on by default: would multiply fp32 islands with 10 bits of fraction
    "enable_skip_layer_norm_strict_mode": "1",  # otherwise its sums have the activations' type
    "cudnn_conv_algo_search": "HEURISTIC",  # exhaustive search would run again for every new batch size
    "arena_extend_strategy": "kSameAsRequested",  # doubling would take memory from other models on the device
}
_BF16 = BY_NAME["bfloat16"]


def check_version(profile: str, requires: Mapping[str, str]) -> None:
    """Raise :class:`RuntimeFailure` when the installed ONNX Runtime is older than ``profile`` ``requires``."""
    required = requires.get("onnxruntime")
    if required is not None and is_older(ort.__version__, required):
        raise RuntimeFailure(
            f"profile {profile} needs ONNX Runtime {required} or later, but {ort.__version__} is installed; upgrade it,"
            " or convert the checkpoint again where it is installed"
        )


def open_session(
    model: Path | bytes,
    *,
    device: str = CPU,
    threads: int | None = None,
    external: Mapping[str, NDArray[Any]] | None = None,
    files: Mapping[str, NDArray[Any]] | None = None,
    values: Mapping[str, NDArray[Any]] | None = None,
    base_dir: Path | None = None,
    library: Path | None = None,
    operators: Sequence[str] = (),
    optimise: bool = True,
    pack: bool = True,
    arena: bool = False,
    name: str = "",
) -> Session:
    """Open a session for ``model`` on the canonical ``device``.

    * ``threads``: how many threads work on one run, including the caller's; None is one per available CPU.
    * ``external``: arrays for initializers whose external data file does not exist. ONNX Runtime copies them.
    * ``files``: the bytes of external data files that do not exist, for a model given as bytes. It copies them, too.
    * ``values``: initializers that the session reads in place and keeps alive. The file that the graph names for them
      must exist but is not read. Only operators that read an input in place may use them. None of them is folded.
    * ``base_dir``: the directory of the external data of a model given as bytes.
    * ``library``: custom operators (:mod:`bf16kit.runtime.ort.kernel`); ``operators``: those of them that the graph
      uses, () is all. ONNX Runtime describes each anew for each session, which takes 8 ms for all.
    * ``optimise``: if false, every operator runs as the graph says; none is fused, folded or dropped.
    * ``pack``: if false, products read their weights in place; else each is copied once, into the fastest layout.
    * ``arena``: keep a CPU run's memory for the next, for many runs of equal shapes by a session that is closed soon.
    * ``name``: the name in errors of a model given as bytes.

    Raises :class:`DeviceUnavailable` when the device cannot be used, :class:`RuntimeFailure` for a graph that cannot.
    """
    options = ort.SessionOptions()
    options.log_severity_level = _FATAL
    if not optimise:
        options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
        options.enable_mem_reuse = False  # it trusts the file's names of dimensions, which may be wrong
    if not pack:
        options.add_session_config_entry("session.disable_prepacking", "1")
    options.intra_op_num_threads = available_cpus() if threads is None else threads
    options.inter_op_num_threads = 1
    # Busy-waiting is faster for a single client, but takes the CPU from all others: from a second session, and from the
    # server's own threads. session.force_spinning_stop, which stops it at the end of a run, does not help with that
    # (docs/decisions/0011-sums-threads-and-tiles.md).
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    # Arm: by default fp32 would be multiplied in bf16.
    options.add_session_config_entry("mlas.enable_gemm_fastmath_arm64_bfloat16", "0")
    # By default, what is multiplied by dequantised weights would be rounded to 8 bits. 1 is fp32.
    options.add_session_config_entry("session.qdq_matmulnbits_accuracy_level", "1")
    if device == CPU:
        # An arena never shrinks: one unusual request would hold its memory forever. A memory pattern, which puts a
        # run's tensors into one block, is kept for each shape ever seen. malloc returns memory, and its cost is
        # negligible (docs/decisions/0028-memory-of-a-server.md).
        options.enable_cpu_mem_arena = arena
        options.enable_mem_pattern = False
    if base_dir is not None:
        options.add_session_config_entry("session.model_external_initializers_file_folder_path", str(base_dir))
    copies = {name: ort.OrtValue.ortvalue_from_numpy(np.ascontiguousarray(a)) for name, a in (external or {}).items()}
    if copies:
        options.add_external_initializers(list(copies), list(copies.values()))
    shared = {name: to_value(array) for name, array in (values or {}).items()}
    for initializer, value in shared.items():
        options.add_initializer(initializer, value)
    if files:
        sizes = [array.nbytes for array in files.values()]
        options.add_external_initializers_from_files_in_memory(list(files), list(files.values()), sizes)
    providers = _providers(device)
    name = name or (model.name if isinstance(model, Path) else f"a graph of {len(model)} bytes")
    with as_runtime_failure(f"ONNX Runtime cannot load {name} on {device}"):
        if library is not None:
            _register(options, library, operators)
        # Without enable_fallback=0 a provider that fails is replaced by another one, with a message to the terminal.
        session = ort.InferenceSession(model, options, providers=providers, enable_fallback=0)
    session.bf16kit_values = shared  # keeps their memory alive as long as the session
    if device != CPU and session.get_providers()[0] != _CUDA_PROVIDER:
        raise DeviceUnavailable(
            f"{device} could not be used by ONNX Runtime {ort.__version__}; check that nvidia-smi lists it and that the"
            " CUDA and cuDNN libraries this onnxruntime-gpu was built for are installed, or run on the CPU"
        )
    return session


def _register(options: Any, library: Path, operators: Sequence[str]) -> None:
    """Register ``operators`` of ``library``; all if there are none, or too many for an entry of the configuration."""
    listed = f",{','.join(operators)},"  # as kernels/ort/domain.cpp reads it
    if operators and len(listed) <= _LONGEST:
        options.add_session_config_entry("bf16kit.operators", listed)
    options.register_custom_ops_library(str(library))


def has_cuda() -> bool:
    """Return whether the installed ONNX Runtime was built with CUDA; that does not mean that a device works."""
    return _CUDA_PROVIDER in ort.get_available_providers()


@contextlib.contextmanager
def run_options_with_timeout(seconds: float) -> Iterator[Any]:
    """Yield options that make ONNX Runtime abort a run, between two nodes, after ``seconds``, and set ``terminate``."""
    options = ort.RunOptions()
    options.log_severity_level = _FATAL
    timer = threading.Timer(seconds, setattr, (options, "terminate", True))
    timer.daemon = True
    try:
        timer.start()
    except RuntimeError as error:  # there is no room for its stack
        raise MemoryError(f"ONNX Runtime cannot be given a time limit: {error}") from error
    try:
        yield options
    finally:
        timer.cancel()


@contextlib.contextmanager
def as_runtime_failure(what: str) -> Iterator[None]:
    """Turn any exception of ONNX Runtime into :class:`RuntimeFailure`: they share no base but Exception.

    An error of CUDA that means that the device cannot be used becomes :class:`DeviceUnavailable`.
    """
    try:
        yield
    except Exception as error:
        if unusable := _NO_DEVICE.search(str(error)):
            raise DeviceUnavailable(f"{what}: {unusable[1]}; {_CHECK}, or run on the CPU") from error
        raise RuntimeFailure(f"{what}: {brief(error)}") from error


def _providers(device: str) -> list[Any]:
    if device == CPU:
        return [_CPU_PROVIDER]
    ort.set_default_logger_severity(_FATAL)
    reasons = []
    if has_cuda():
        # Finds CUDA's libraries in the nvidia-* wheels, or where the system has them, and prints which are in neither.
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            ort.preload_dlls()
        reasons = re.findall("^Failed to load lib(?!nvrtc).*", printed.getvalue(), re.MULTILINE)  # nvrtc is optional
    else:
        reasons.append(
            f"the installed ONNX Runtime {ort.__version__} has no CUDA provider; install bf16kit[gpu] in place of"
            " bf16kit[cpu]"
        )
    try:
        # Without it, loading the session would only say that the CPU has no bf16 operators.
        ctypes.CDLL(_DRIVER)
    except OSError as error:
        reasons.append(f"NVIDIA's driver is missing ({error}); {_CHECK}")
    if reasons:
        raise DeviceUnavailable(f"{device} was asked for, but {'; and '.join(reasons)}, or run on the CPU")
    return [(_CUDA_PROVIDER, {"device_id": device.removeprefix("cuda:"), **_CUDA_OPTIONS}), _CPU_PROVIDER]


def run_with_values(
    session: Session, names: Sequence[str], feeds: Mapping[str, Array], options: Any = None
) -> list[Array]:
    """Return the outputs ``names``, in their order; bfloat16 arrays in ``feeds`` and in the outputs are ml_dtypes'."""
    values = {name: to_value(array) for name, array in feeds.items()}
    return [_to_array(value) for value in session.run_with_ort_values(names, values, options)]


def to_value(array: Array) -> Any:
    """Return an OrtValue that reads the contiguous ``array`` in place and keeps it alive."""
    if array.dtype == _BF16.numpy:
        return ort.OrtValue.ortvalue_from_numpy_with_onnx_type(array.view(np.uint16), _BF16.onnx)
    return ort.OrtValue.ortvalue_from_numpy(array)


def _to_array(value: Any) -> Array:
    if value.data_type() != "tensor(bfloat16)":
        return np.asarray(value.numpy())
    shape = tuple(value.shape())
    size = int(np.prod(shape)) * _BF16.numpy.itemsize
    data = ctypes.string_at(value.data_ptr(), size) if size else b""  # a copy, because the value frees its memory
    return np.frombuffer(bytearray(data), dtype=ml_dtypes.bfloat16).reshape(shape)
