"""The contract between a loaded model and its callers, and devices by the names that users give them.

A :class:`Runtime` is one loaded graph on one device. The server runs requests through it and the converter verifies
through it, so the code that was verified is the code that serves. This file imports neither onnxruntime nor torch.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from bf16kit.messages.errors import ConfigError
from bf16kit.numerics.tensors import Array as Array
from bf16kit.numerics.tensors import TensorSpec
from bf16kit.system import controlgroup

CPU = "cpu"
_CUDA = re.compile(r"cuda(?::(\d{1,3}))?")

Accumulation = Literal["fp32", "bf16", "unknown"]


def canonical(device: str) -> str:
    """``cpu`` or ``cuda:N``; plain ``cuda`` is ``cuda:0``. Raises :class:`ConfigError` for any other text."""
    if device == CPU:
        return device
    found = _CUDA.fullmatch(device)
    if found is None:
        raise ConfigError(f"unknown device {device!r}; devices are cpu and cuda:N, as in cuda:0")
    return f"cuda:{int(found[1] or 0)}"


def available_cpus() -> int:
    """Return how many CPUs this process may use: its affinity, or the control group's quota if that is smaller.

    A container limited to two CPUs on a machine of 64 sees 64. Threads beyond two would only wait for each other.
    """
    cpus, quota = len(os.sched_getaffinity(0)), controlgroup.cpus()
    return cpus if quota is None else max(1, min(cpus, round(quota)))


@dataclass(frozen=True, slots=True)
class RuntimeInfo:
    """How a model actually runs, as found at load rather than as configured.

    ``precision`` is the arithmetic used: ``bf16`` or ``fp32`` multiplication, with weights stored as bf16 or fp32.
    ``accumulation`` is what the accumulation probe measured on this device.
    """

    backend: str  # "onnxruntime" | "torchscript" | "torchexport"
    device: str  # "cpu" | "cuda:0"
    profile: str  # "cpu" | "cpu-bf16" | "cuda" | "torchscript" | "pt2" | "reference"
    precision: str  # "bf16" | "bf16-weights" | "fp32"
    accumulation: Accumulation
    note: str = ""  # one sentence for users, e.g. why bf16 was widened
    kernel: str = ""  # the path of the CPU kernel in use: one of kernel.PATHS; "" = the kernel is not used
    advice: str = ""  # the cost of what the note says, and the remedy if any: logged once, not for every model
    choice: str = ""  # why this profile was chosen, if there were others


class Runtime(Protocol):
    """One loaded graph. ``run`` may be called from several threads at once; ``close`` frees the device memory."""

    @property
    def inputs(self) -> tuple[TensorSpec, ...]: ...

    @property
    def outputs(self) -> tuple[TensorSpec, ...]: ...

    @property
    def info(self) -> RuntimeInfo: ...

    def run(
        self, feeds: Mapping[str, Array], outputs: Sequence[str] | None = None, *, seconds: float | None = None
    ) -> dict[str, Array]:
        """Return the outputs by name, in the order of ``outputs`` (all of them for ``None``).

        ``feeds`` holds one C-contiguous array per input, of the input's dtype; the caller has checked it against
        ``inputs``. A run that takes longer than ``seconds`` is aborted and fails, if the backend supports that: torch
        does not. Raises :class:`RuntimeFailure` when the backend fails.
        """
        ...

    def close(self) -> None: ...
