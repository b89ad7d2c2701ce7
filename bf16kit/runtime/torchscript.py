"""Runs a TorchScript module with PyTorch; also holds what both torch runtimes share.

The modules hold bf16 weights and compute in bf16, with fp32 inputs and outputs. A CPU without bf16 instructions
emulates that 8 to 10 times slower than fp32. There the module is widened once, at load: same weights, fp32 arithmetic.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import torch
from numpy.typing import NDArray

from bf16kit.messages.errors import DeviceUnavailable, RuntimeFailure
from bf16kit.numerics.tensors import TensorSpec
from bf16kit.runtime import Accumulation, Array, RuntimeInfo, RuntimeProperties, scriptgraph
from bf16kit.runtime.device import CPU, available_cpus, canonical, cpu_has_bf16
from bf16kit.runtime.probe import classify, weights

_BF16 = np.dtype(ml_dtypes.bfloat16)
WIDENED = "this CPU has no bf16 instructions: the bf16 module was widened to fp32 once, at load"


class TorchRuntime(RuntimeProperties):
    """The base of both torch runtimes: edges, device, threads and runs. A subclass sets ``_call`` and ``_info``.

    ``title`` names the format in messages. Raises :class:`DeviceUnavailable` when the device cannot be used.
    """

    _call: Callable[..., Any] | None = None

    def __init__(
        self, title: str, inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec], device: str, threads: int | None
    ) -> None:
        self._title, self._name = title, canonical(device)
        check_dtypes((*inputs, *outputs), title)
        self._inputs, self._outputs = tuple(inputs), tuple(outputs)
        self._dtypes = {spec.name: torch_dtype(spec.dtype) for spec in outputs}
        self._device = open_device(self._name)
        self._threads = available_cpus() if threads is None else threads

    def run(
        self, feeds: Mapping[str, Array], outputs: Sequence[str] | None = None, *, seconds: float | None = None
    ) -> dict[str, Array]:
        """See :meth:`bf16kit.runtime.Runtime.run`. The model is called with the inputs in the order of the specs."""
        call = self._call
        if call is None:
            raise RuntimeFailure("the model is closed")
        use_threads(self._threads)
        try:
            with torch.inference_mode():
                arguments = [to_tensor(feeds[spec.name]).to(self._device) for spec in self._inputs]
                tensors = self._named(call(*arguments))
                requested = tensors if outputs is None else {name: tensors[name] for name in outputs}
                return {name: to_array(tensor, self._dtypes[name]) for name, tensor in requested.items()}
        except RuntimeFailure:
            raise
        except Exception as error:  # whatever the model's code raises
            raise RuntimeFailure(f"{self._title} failed: {last_line(error)}") from error

    def close(self) -> None:
        """Drop the model; its weights are freed when the active runs have ended. Later calls of ``run`` fail."""
        self._call = None

    def _computes_in_bf16(self, is_bf16: bool, native_bf16: bool | None) -> bool:
        """Return whether the model computes in bf16; ``native_bf16`` is the runtime's argument."""
        return is_bf16 and (native_bf16 if native_bf16 is not None else self._name != CPU or cpu_has_bf16())

    def _runtime_info(self, backend: str, profile: str, is_bf16: bool, native: bool) -> RuntimeInfo:
        return RuntimeInfo(
            backend,
            self._name,
            profile,
            precision(is_bf16, native),
            probe_torch(self._device, torch.bfloat16 if native else torch.float32),
            WIDENED if is_bf16 and not native else "",
        )

    def _named(self, value: Any) -> dict[str, torch.Tensor]:
        names = [spec.name for spec in self._outputs]
        if isinstance(value, Mapping):
            missing = sorted(set(names) - value.keys())
            if missing:
                raise RuntimeFailure(f"the module gives {', '.join(value)}, but no output {missing[0]!r}")
            return {name: value[name] for name in names}
        values = [value] if isinstance(value, torch.Tensor) else list(value)
        if len(values) != len(names):
            raise RuntimeFailure(f"the module gives {len(values)} outputs, expected {len(names)}: {', '.join(names)}")
        return dict(zip(names, values, strict=True))


class TorchScriptRuntime(TorchRuntime):
    """One TorchScript module, loaded: a :class:`bf16kit.runtime.Runtime`.

    ``threads`` is how many threads work on one run on the CPU; None is one per available CPU. ``native_bf16`` says
    whether the device computes in bf16; None detects it on the CPU, and is True on CUDA.

    On CUDA this sets torch's global switches for the process: full fp32 accumulation, and no TF32. Raises
    :class:`DeviceUnavailable` when the device cannot be used, :class:`RuntimeFailure` for a file that cannot be loaded.
    """

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
        super().__init__("TorchScript", inputs, outputs, device, threads)
        module = load_module(path, self._device)
        is_bf16 = any(t.dtype == torch.bfloat16 for t in scriptgraph.tensors(module, module.graph))
        native = self._computes_in_bf16(is_bf16, native_bf16)
        if is_bf16 and not native:
            _widen(module)
        self._info = self._runtime_info("torchscript", "torchscript", is_bf16, native)
        self._call = module


def use_threads(threads: int) -> None:
    """Let ``threads`` threads work on what the calling thread runs next.

    torch keeps one number per process and one per thread that has run; if they already agree this is only a read.
    """
    if torch.get_num_threads() != threads:
        torch.set_num_threads(threads)


def cuda_works() -> bool:
    """Return whether the installed torch can use a CUDA device."""
    return torch.cuda.is_available()


def probe_torch(device: torch.device, dtype: torch.dtype) -> Accumulation:
    """Run the accumulation probe with torch's matrix product of ``dtype`` on ``device``."""
    right = torch.from_numpy(weights()).to(device, dtype)

    def product(x: NDArray[np.float32]) -> NDArray[Any]:
        with torch.inference_mode():
            sums = torch.from_numpy(x).to(device, dtype) @ right
        return np.asarray(sums.float().cpu().numpy())

    return classify(product)


def precision(is_bf16: bool, native: bool) -> str:
    """Return the arithmetic of a program, by whether it has bf16 weights and the device computes in bf16."""
    if not is_bf16:
        return "fp32"
    return "bf16" if native else "bf16-weights"


def open_device(device: str) -> torch.device:
    """Open the canonical ``device`` and set torch to accumulate in full.

    Raises :class:`DeviceUnavailable` if it is missing.
    """
    if device == CPU:
        return torch.device(CPU)
    if not torch.cuda.is_available():
        raise DeviceUnavailable(
            f"{device} was asked for, but torch {torch.__version__} sees no CUDA device; install a CUDA build of torch"
            " on a machine where nvidia-smi lists a GPU, or run on the CPU"
        )
    index = torch.device(device).index
    if index >= torch.cuda.device_count():
        raise DeviceUnavailable(f"{device} was asked for, but there are {torch.cuda.device_count()} CUDA devices")
    matmul = torch.backends.cuda.matmul
    matmul.allow_bf16_reduced_precision_reduction = (False, False)  # reduction, split-K
    matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
    return torch.device(device)


def load_module(path: Path, device: torch.device) -> Any:
    """Return the module in ``path`` in evaluation mode, its graph inlined: a ``torch.jit.ScriptModule``.

    Loading runs the code in the file. Raises :class:`RuntimeFailure` if torch cannot load it.
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


def _widen(module: Any) -> None:
    """Widen a bf16 module to fp32: exactly the same weights, and fp32 arithmetic."""
    scriptgraph.replace_dtypes(module.graph, scriptgraph.BFLOAT16, scriptgraph.FLOAT32)
    with torch.inference_mode():
        scriptgraph.convert_tensors(module, module.graph, lambda t: t.float() if t.dtype == torch.bfloat16 else t)


def check_dtypes(specs: Sequence[TensorSpec], backend: str) -> None:
    """Raise :class:`RuntimeFailure` for a spec of strings, which ``backend`` does not support."""
    for spec in specs:
        if spec.dtype == "string":
            raise RuntimeFailure(f"{spec.name!r} is a string tensor, which {backend} does not have")


def torch_dtype(name: str) -> torch.dtype:
    """Return torch's dtype for numpy's name."""
    dtype = getattr(torch, name)
    assert isinstance(dtype, torch.dtype)  # noqa: S101 - for the type checker; numpy's and torch's names agree
    return dtype


def last_line(error: Exception) -> str:
    """Return the error's last line; the lines before it trace the module's code."""
    lines = str(error).strip().splitlines()
    return lines[-1] if lines else type(error).__name__


def to_tensor(array: Array) -> torch.Tensor:
    """Return ``array`` as a tensor over the same memory.

    A read-only array is copied, because torch has no such tensors.
    """
    writable = array if array.flags.writeable else array.copy()
    if array.dtype == _BF16:
        return torch.from_numpy(writable.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(writable)


def to_array(tensor: torch.Tensor, dtype: torch.dtype) -> Array:
    """Return ``tensor`` as an array on the CPU, in ``dtype``."""
    found = tensor.to(CPU, dtype).contiguous()
    if dtype == torch.bfloat16:
        return np.asarray(found.view(torch.int16).numpy()).view(_BF16)
    return np.asarray(found.numpy())
