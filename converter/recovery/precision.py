"""The arithmetic of a recovery: Lightning's precision plugins, chosen explicitly, and the device.

They are chosen explicitly because ``Trainer(precision="16-mixed")`` silently computes in bf16 on a CPU.
"""

from __future__ import annotations

from typing import Any

import torch

from bf16kit.messages.errors import UsageError
from converter.recovery.settings import BACKOFF, GROWTH, Precision, Scaling

_DTYPES = {
    "bf16-mixed": torch.bfloat16,
    "bf16-true": torch.bfloat16,
    "16-mixed": torch.float16,
    "32-true": torch.float32,
}
# torch rejects 1 for either factor. The scale is held in fp32, in which both equal 1. So it never changes, but steps
# with gradients that are not finite are still skipped.
_UP, _DOWN = 1 + 1e-12, 1 - 1e-12


def dtype(precision: Precision) -> torch.dtype:
    """Return the dtype in which products are computed."""
    return _DTYPES[precision]


def arithmetic(precision: Precision, device: torch.device) -> torch.autocast:
    """Return the context in which products of fp32 weights are computed as ``precision`` says."""
    computed = dtype(precision)
    return torch.autocast(device.type, computed, enabled=computed != torch.float32)


def device(given: str) -> torch.device:
    """Parse ``auto``, ``cpu``, ``cuda`` or ``cuda:N``; raise :class:`UsageError` for another word or a missing GPU."""
    if given == "auto":
        return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    kind, _, number = given.partition(":")
    if given != "cpu" and (kind != "cuda" or not (number or "0").isdecimal()):
        raise UsageError(f"--device {given}: expected auto, cpu, cuda or cuda:N")
    if kind == "cpu":
        return torch.device("cpu")
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if int(number or 0) >= count:
        here = f"{count} CUDA device{'s'[: count != 1]}" if count else "no CUDA device that torch can use"
        raise UsageError(f"--device {given}: this machine has {here}; use --device cpu, or auto")
    return torch.device("cuda", int(number or 0))


def scaler(scaling: Scaling, device: torch.device) -> torch.amp.GradScaler:
    """Return the scaler of the loss, which also skips steps with gradients that are not finite; ``none`` does
    neither."""
    if scaling.kind == "none":
        return torch.amp.GradScaler(device.type, enabled=False)
    if scaling.kind == "static":
        return torch.amp.GradScaler(device.type, scaling.factor, _UP, _DOWN, 1)
    return torch.amp.GradScaler(device.type, scaling.factor, GROWTH, BACKOFF, scaling.interval)


def plugin(precision: Precision, scaling: Scaling, device: torch.device) -> Any:
    """Return Lightning's plugin for ``precision``; its autocast computes in :func:`dtype`, also on a CPU."""
    from lightning.pytorch.plugins import HalfPrecision, MixedPrecision
    from lightning.pytorch.plugins.precision import Precision as FullPrecision

    if precision == "32-true":
        return FullPrecision()
    if precision == "bf16-true":
        return HalfPrecision("bf16-true")
    if precision == "bf16-mixed":
        return MixedPrecision("bf16-mixed", device.type)
    return MixedPrecision("16-mixed", device.type, scaler(scaling, device))


def notes(precision: Precision, scaling: Scaling, device: torch.device) -> list[str]:
    """Return notes for the user on the chosen arithmetic."""
    found = []
    if precision == "16-mixed" and device.type == "cpu":
        found.append(
            "--precision 16-mixed on a CPU: this recovery computed its products in fp16; Lightning's own trainer"
            " would have used bf16 without notice"
        )
    if precision == "16-mixed" and scaling.kind == "none":
        found.append("--loss-scaling none with fp16: gradients that underflow are lost; the report says how many")
    if precision in ("bf16-mixed", "bf16-true"):
        found.append(
            f"--precision {precision}: no loss scaling, because bf16 has the exponents of fp32; the report has the"
            " shares of gradients that underflow in fp16 and in bf16"
        )
    if precision == "bf16-true":
        found.append("--precision bf16-true: weights have no fp32 copy, so small updates are rounded away")
    return found
