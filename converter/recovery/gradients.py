"""Counts how many gradients of a step would be lost in fp16 and bf16, with and without loss scaling.

The gradients are computed in fp32. fp16 ends at 2^-24 below and 65,504 above. In most networks, gradients of
activations lie below 2^-24, which is why the loss is scaled (P. Micikevicius et al., "Mixed Precision Training", ICLR
2018, section 3.2). bf16 has the exponents of fp32 and ends at 2^-133. torch rounds each gradient to the format for the
count.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from bf16kit.artifact.recoveryentries import GradientEntry

_FORMATS = {"fp16": torch.float16, "bf16": torch.bfloat16}


@dataclass
class _Counts:
    values: int = 0
    vanished: int = 0
    subnormal: int = 0
    overflowed: int = 0


@dataclass
class GradientCounts:
    """The counts of one step, by (weights or activations, format, scale)."""

    step: int
    scales: Sequence[float]
    counts: dict[tuple[str, str, float], _Counts] = field(default_factory=dict)

    def add(self, of: str, gradient: torch.Tensor) -> None:
        """Count the finite non-zero values of an fp32 ``gradient``; ``of`` is "weights" or "activations"."""
        values = gradient.detach().float().reshape(-1)
        values = values[torch.isfinite(values) & (values != 0)]
        for name, dtype in _FORMATS.items():
            for scale in self.scales:
                scaled = (values * scale).to(dtype).float().abs()
                counts = self.counts.setdefault((of, name, scale), _Counts())
                counts.values += values.numel()
                counts.vanished += int((scaled == 0).sum())
                counts.subnormal += int(((scaled > 0) & (scaled < torch.finfo(dtype).smallest_normal)).sum())
                counts.overflowed += int(torch.isinf(scaled).sum())

    def entries(self) -> list[GradientEntry]:
        """Return one entry for each combination, in the order of the table."""
        return [
            GradientEntry(
                step=self.step,
                of=of,
                format=name,
                scale=scale,
                values=counts.values,
                vanished=counts.vanished,
                subnormal=counts.subnormal,
                overflowed=counts.overflowed,
            )
            for (of, name, scale), counts in sorted(self.counts.items(), key=lambda item: (item[0][0], item[0][2]))
        ]


def count_gradients(
    step: int, scale: float, module: torch.nn.Module, weights: Sequence[torch.Tensor], loss: Callable[[], torch.Tensor]
) -> list[GradientEntry]:
    """Count the gradients of ``loss()``, a pass of ``module`` in fp32, for ``weights`` and each layer's output.

    The counts are made without a scale and with ``scale``. The stored gradients of ``weights`` do not change.
    """
    found = GradientCounts(step, sorted({1.0, scale}))
    with _gradient_hooks(module, lambda gradient: found.add("activations", gradient)):
        value = loss()
        for gradient in torch.autograd.grad(value, list(weights), allow_unused=True):
            if gradient is not None:
                found.add("weights", gradient)
    return found.entries()


@contextmanager
def _gradient_hooks(module: torch.nn.Module, on_gradient: Callable[[torch.Tensor], None]) -> Iterator[None]:
    """While active, calls ``on_gradient`` with the gradient of each tensor that a layer without submodules returns."""

    def hook(_module: torch.nn.Module, _given: object, output: object) -> None:
        if isinstance(output, torch.Tensor) and output.requires_grad:
            output.register_hook(on_gradient)

    handles = [part.register_forward_hook(hook) for part in module.modules() if not any(part.children())]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
