"""Runs TorchScript modules and torch.export programs (.pt2) with PyTorch.

Loading one runs what is in it: whoever writes the repository decides what runs (SECURITY.md). The modules hold bf16
weights and compute in bf16, with fp32 inputs and outputs. A CPU without bf16 instructions emulates that 8 to 10 times
slower than fp32. There the module is widened once, at load: same weights, fp32 arithmetic.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import ml_dtypes
import numpy as np
import torch
from numpy.typing import NDArray
from torch.fx.node import map_aggregate

from bf16kit.messages.errors import DeviceUnavailable, RuntimeFailure
from bf16kit.numerics.tensors import TensorSpec
from bf16kit.runtime import CPU, Accumulation, Array, RuntimeInfo, available_cpus, canonical, scriptgraph
from bf16kit.runtime.probe import classify, weights

if TYPE_CHECKING:
    from torch.export import ExportedProgram

CPUINFO = Path("/proc/cpuinfo")  # what the kernel says of the processor
_BF16 = np.dtype(ml_dtypes.bfloat16)
# x86 dot products (AVX512_BF16), x86 tiles (AMX), and the Arm extension, as the Linux kernel names them.
_BF16_FLAGS = frozenset({"avx512_bf16", "amx_bf16", "bf16"})
_LOADING = threading.Lock()  # torch keeps the program that it loads in a variable of the process
_WIDENED = "this CPU has no bf16 instructions: the bf16 module was widened to fp32 once, at load"


class TorchRuntime(ABC):
    """A program of torch, loaded: a :class:`bf16kit.runtime.Runtime`. A subclass loads one format.

    ``threads`` is how many threads work on one run on the CPU; None is one per available CPU. ``native_bf16`` says
    whether the device computes in bf16; None detects it on the CPU, and is True on CUDA.

    On CUDA this sets torch's global switches for the process: full fp32 accumulation, and no TF32. Raises
    :class:`DeviceUnavailable` when the device cannot be used, :class:`RuntimeFailure` for a file that cannot be loaded.
    """

    title: ClassVar[str]  # of the format, in messages
    backend: ClassVar[str]
    profile: ClassVar[str]

    def __init__(
        self,
        path: Path,
        inputs: Sequence[TensorSpec],
        outputs: Sequence[TensorSpec],
        *,
        device: str = CPU,
        threads: int | None = None,
        native_bf16: bool | None = None,
    ) -> None:
        for spec in (*inputs, *outputs):
            if spec.dtype == "string":
                raise RuntimeFailure(f"{spec.name!r} is a string tensor, which {self.title} does not have")
        self.inputs, self.outputs = tuple(inputs), tuple(outputs)
        self._specs = {spec.name: spec for spec in outputs}
        name = canonical(device)
        self._device = _open_device(name)
        self._threads = available_cpus() if threads is None else threads
        native = native_bf16 if native_bf16 is not None else name != CPU or cpu_has_bf16()
        call, is_bf16 = self._load(path, self._device, native)
        accumulation = probe_torch(self._device, torch.bfloat16 if is_bf16 and native else torch.float32)
        precision = ("bf16" if native else "bf16-weights") if is_bf16 else "fp32"
        note = _WIDENED if precision == "bf16-weights" else ""
        self.info = RuntimeInfo(self.backend, name, self.profile, precision, accumulation, note)
        self._call: Callable[..., Any] | None = call

    @staticmethod
    @abstractmethod
    def _load(path: Path, device: torch.device, native: bool) -> tuple[Callable[..., Any], bool]:
        """Return the program in ``path`` and whether it is in bf16; if so and not ``native``, it is widened."""

    def run(
        self, feeds: Mapping[str, Array], outputs: Sequence[str] | None = None, *, seconds: float | None = None
    ) -> dict[str, Array]:
        """See :meth:`bf16kit.runtime.Runtime.run`. The program is called with the inputs in the order of the specs."""
        call = self._call
        if call is None:
            raise RuntimeFailure("the model is closed")
        if torch.get_num_threads() != self._threads:  # one number per thread that has run
            torch.set_num_threads(self._threads)
        try:
            with torch.inference_mode():
                arguments = [_to_tensor(feeds[spec.name]).to(self._device) for spec in self.inputs]
                tensors = self._named(call(*arguments))
                specs = self.outputs if outputs is None else [self._specs[name] for name in outputs]
                return {
                    spec.name: to_array(tensors[spec.name].to(CPU, getattr(torch, spec.dtype)).contiguous())
                    for spec in specs
                }
        except RuntimeFailure:
            raise
        except Exception as error:  # whatever the model's code raises
            raise RuntimeFailure(f"{self.title} failed: {last_line(error)}") from error

    def close(self) -> None:
        """Drop the model; its weights are freed when the active runs have ended. Later calls of ``run`` fail."""
        self._call = None

    def _named(self, value: Any) -> Mapping[str, torch.Tensor]:
        names = list(self._specs)
        if isinstance(value, Mapping):
            missing = sorted(set(names) - value.keys())
            if missing:
                raise RuntimeFailure(f"the module gives {', '.join(value)}, but no output {missing[0]!r}")
            return value
        values = [value] if isinstance(value, torch.Tensor) else list(value)
        if len(values) != len(names):
            raise RuntimeFailure(f"the module gives {len(values)} outputs, expected {len(names)}: {', '.join(names)}")
        return dict(zip(names, values, strict=True))


class TorchScriptRuntime(TorchRuntime):
    """One TorchScript module, loaded."""

    title, backend, profile = "TorchScript", "torchscript", "torchscript"

    @staticmethod
    def _load(path: Path, device: torch.device, native: bool) -> tuple[Callable[..., Any], bool]:
        module = load_module(path, device)
        is_bf16 = any(tensor.dtype == torch.bfloat16 for tensor in scriptgraph.tensors(module, module.graph))
        if is_bf16 and not native:
            scriptgraph.widen(module)
        return module, is_bf16


class TorchExportRuntime(TorchRuntime):
    """One torch.export program, loaded. The file is read, not mapped."""

    title, backend, profile = "torch.export's program", "torchexport", "pt2"

    @staticmethod
    def _load(path: Path, device: torch.device, native: bool) -> tuple[Callable[..., Any], bool]:
        from torch.export.passes import move_to_device_pass

        program = load_program(path)
        is_bf16 = any(tensor.dtype is torch.bfloat16 for tensor in tensors_of(program).values())
        if device.type != CPU:
            program = move_to_device_pass(program, device)
        module = program.module(check_guards=False)
        if is_bf16 and not native:
            widen(module, (torch.bfloat16,))
        return module.forward, is_bf16  # not the module itself, which prints its code when an operator fails


def load_module(path: Path, device: torch.device) -> Any:
    """Return the module in ``path`` in evaluation mode, its graph inlined: a ``torch.jit.ScriptModule``.

    Raises :class:`RuntimeFailure` if torch cannot load it.
    """
    try:
        module: Any = torch.jit.load(path, map_location=device)
        module.eval()
        # Inline submodules and functions into one graph, as the executor would do at the first run.
        torch._C._jit_pass_inline(module.graph)
    except Exception as error:  # torch raises RuntimeError, ValueError, pickle's errors and zip's
        raise RuntimeFailure(f"TorchScript cannot load {path.name}: {last_line(error)}") from error
    scriptgraph.replace_devices(module.graph, str(device))
    return module


def load_program(path: Path) -> ExportedProgram:
    """Load the torch.export program at ``path``; raise :class:`RuntimeFailure` with the reason if torch cannot."""
    from torch.export.pt2_archive._package import load_pt2  # takes 70 MB, which TorchScript does not need

    with _LOADING:
        with suppress(Exception):  # torch only logs the reason, so it is asked again
            return torch.export.load(path)
        try:
            program: ExportedProgram = load_pt2(str(path)).exported_programs["model"]
        except Exception as error:
            raise RuntimeFailure(f"torch.export cannot load {path.name}: {last_line(error)}") from error
    return program


def tensors_of(program: ExportedProgram) -> dict[str, torch.Tensor]:
    """Return the tensors of ``program`` by name: parameters, buffers and constants."""
    constants = {name: value for name, value in program.constants.items() if isinstance(value, torch.Tensor)}
    return {**program.state_dict, **constants}


def widen(module: torch.fx.GraphModule, dtypes: Collection[torch.dtype]) -> None:
    """Make ``module`` compute in float32 instead of ``dtypes``: its tensors, and the dtypes in its graphs."""

    def wide(value: Any) -> Any:
        return torch.float32 if isinstance(value, torch.dtype) and value in dtypes else value

    for part in graph_modules(module):
        for node in part.graph.nodes:
            node.args, node.kwargs = map_aggregate(node.args, wide), map_aggregate(node.kwargs, wide)
        part.recompile()
    widened: dict[tuple[Any, ...], torch.Tensor] = {}  # once for all names of a tensor
    for tensor in (*module.parameters(), *module.buffers()):
        if tensor.dtype in dtypes:
            key = tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride()
            tensor.data = widened.setdefault(key, tensor.data.float())


def graph_modules(module: torch.fx.GraphModule) -> list[torch.fx.GraphModule]:
    """Return ``module`` and the graphs that run inside it, under a mode of torch or on a condition."""
    return [part for part in module.modules() if isinstance(part, torch.fx.GraphModule)]


def probe_torch(device: torch.device, dtype: torch.dtype) -> Accumulation:
    """Run the accumulation probe with torch's matrix product of ``dtype`` on ``device``."""
    right = torch.from_numpy(weights()).to(device, dtype)

    def product(x: NDArray[np.float32]) -> NDArray[Any]:
        with torch.inference_mode():
            sums = torch.from_numpy(x).to(device, dtype) @ right
        return np.asarray(sums.float().cpu().numpy())

    return classify(product)


def cuda_works() -> bool:
    """Return whether the installed torch can use a CUDA device."""
    return torch.cuda.is_available()


def cpu_has_bf16(cpuinfo: Path | None = None) -> bool:
    """Return whether the CPU multiplies bf16 in hardware; False if the system does not say."""
    with suppress(OSError):
        for line in (cpuinfo or CPUINFO).read_text(encoding="utf-8", errors="replace").splitlines():
            key, _, flags = line.partition(":")
            if key.strip() in ("flags", "Features"):
                return not _BF16_FLAGS.isdisjoint(flags.split())
    return False


def _open_device(device: str) -> torch.device:
    """Open the canonical ``device`` and set torch to accumulate in full; DeviceUnavailable if it is missing."""
    if device == CPU:
        return torch.device(CPU)
    if not cuda_works():
        raise DeviceUnavailable(
            f"{device} was asked for, but torch {torch.__version__} sees no CUDA device; install a CUDA build of torch"
            " on a machine where nvidia-smi lists a GPU, or run on the CPU"
        )
    if torch.device(device).index >= torch.cuda.device_count():
        raise DeviceUnavailable(f"{device} was asked for, but there are {torch.cuda.device_count()} CUDA devices")
    matmul = torch.backends.cuda.matmul
    matmul.allow_bf16_reduced_precision_reduction = (False, False)  # reduction, split-K
    matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
    return torch.device(device)


def last_line(error: Exception) -> str:
    """Return the error's last line; the lines before it trace the module's code."""
    lines = str(error).strip().splitlines()
    return lines[-1] if lines else type(error).__name__


def _to_tensor(array: Array) -> torch.Tensor:
    """Return a copy of ``array`` as a tensor: a program may change its inputs."""
    copy = array.copy()
    if array.dtype == _BF16:
        return torch.from_numpy(copy.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(copy)


def to_array(tensor: torch.Tensor) -> Array:
    """Return an array over the memory of ``tensor``, which is contiguous and on the CPU."""
    if tensor.dtype == torch.bfloat16:
        return np.asarray(tensor.view(torch.int16).numpy()).view(_BF16)
    return np.asarray(tensor.numpy())
