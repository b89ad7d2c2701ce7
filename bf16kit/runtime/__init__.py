"""The contract between a model and whoever runs it: the smallest file, importing neither onnxruntime nor torch.

A :class:`Runtime` is one loaded graph on one device. The server runs requests through it and the converter verifies
through it: what is certified is what serves.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np

from bf16kit.tensors import Array as Array
from bf16kit.tensors import TensorSpec

Accumulation = Literal["fp32", "bf16", "unknown"]


@dataclass(frozen=True, slots=True)
class RuntimeInfo:
    """How a model really runs, as found at load rather than as configured.

    ``precision`` is the arithmetic done: ``bf16`` or ``fp32`` multiplication, of weights stored as bf16 or fp32.
    ``accumulation`` is what the accumulation probe measured on this device.
    """

    backend: str  # "onnxruntime" | "torchscript" | "torchexport"
    device: str  # "cpu" | "cuda:0"
    profile: str  # "cpu" | "cpu-bf16" | "cuda" | "torchscript" | "pt2" | "reference"
    precision: str  # "bf16" | "bf16-weights" | "fp32"
    accumulation: Accumulation
    note: str = ""  # one sentence for people, e.g. why bf16 was widened
    kernel: str = ""  # the path of the CPU kernel that runs: one of kernel.PATHS; "" = it has no part
    advice: str = ""  # what the note costs and its remedy, where there is one: worth saying once, not for every model
    choice: str = ""  # why this profile answers, where there were others to choose from


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
        """Outputs by name, in the order asked for (all of them for ``None``).

        ``feeds`` holds one C-contiguous array per input, of the input's dtype; the caller has checked it against
        ``inputs``. A run that takes longer than ``seconds`` is ended and fails, where the backend can be told to:
        torch cannot. Raises :class:`~bf16kit.errors.RuntimeFailure` when the backend fails.
        """
        ...

    def close(self) -> None: ...


def contiguous(feeds: Mapping[str, Array]) -> dict[str, Array]:
    """The same feeds, C-contiguous; arrays that already are stay the same object.

    A scalar stays one: ``np.ascontiguousarray`` would make a vector of it.
    """
    return {name: np.asarray(array, order="C") for name, array in feeds.items()}
