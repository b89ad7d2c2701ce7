"""The loss that a recovery minimises: the distance from the fp32 outputs, or the cross-entropy of labels."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from bf16kit.messages.errors import UsageError
from bf16kit.numerics.tensors import TensorSpec

_SMALLEST = 1e-12  # of a squared norm: an output of zeros has no relative distance


def distillation(outputs: Mapping[str, torch.Tensor], reference: Mapping[str, torch.Tensor], rows: int) -> torch.Tensor:
    """Return the mean over outputs and samples of ‖c − r‖² ÷ ‖r‖², in fp32; c of ``outputs``, r of ``reference``.

    This is the square of the drift budget's ``relative_l2``. A sample is a row of the first axis if every output has
    ``rows`` of them, else a whole output. Elements that are infinite in r, such as masked logits, are left out. Integer
    outputs are left out too. Raises :class:`UsageError` if no output holds floats.
    """
    batched = all(tensor.ndim > 0 and tensor.shape[0] == rows for tensor in reference.values())
    distances = []
    for name, r in reference.items():
        c = outputs[name]
        if not (c.is_floating_point() and r.is_floating_point()):
            continue
        r, c = (tensor.float().reshape(rows if batched else 1, -1) for tensor in (r, c))
        judged = torch.isfinite(r)
        r, c = torch.where(judged, r, 0.0), torch.where(judged, c, 0.0)
        distances.append(((c - r).square().sum(1) / r.square().sum(1).clamp_min(_SMALLEST)).mean())
    if not distances:
        raise UsageError(f"--loss distillation: no output of the model holds floats: {', '.join(reference)}")
    return torch.stack(distances).mean()


def cross_entropy(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Return the mean cross-entropy, in fp32, of ``labels`` [...] and ``logits`` [..., classes]; −100 is ignored."""
    return torch.nn.functional.cross_entropy(logits.float().reshape(-1, logits.shape[-1]), labels.reshape(-1))


def logits_of(outputs: Sequence[TensorSpec]) -> str | None:
    """Return the name of the only output of kind logits, to which labels belong; None if there is not exactly one."""
    found = [spec.name for spec in outputs if spec.kind == "logits"]
    return found[0] if len(found) == 1 else None
