"""Finds which weights are trained and how the artifact rounds them, and turns them into a checkpoint again."""

from __future__ import annotations

import hashlib
import itertools
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from bf16kit.artifact.artifact import Artifact
from bf16kit.artifact.manifest import RESIDUAL
from converter.read.statedict import to_torch
from converter.source import Array

State = dict[str, torch.Tensor]  # values of what is trained, by each parameter's first name
_NORMS = (torch.nn.LayerNorm, torch.nn.GroupNorm, torch.nn.RMSNorm)  # these are folded into no weight


@dataclass(frozen=True, slots=True)
class TrainedParameter:
    """A parameter of the module, with all its names there, and the checkpoint's ``tensors`` that hold it.

    If ``rounds``, the artifact stores it in bf16, multiplied by ``scale`` (float64, broadcast; None: 1).
    """

    names: tuple[str, ...]
    tensors: tuple[str, ...]
    rounds: bool
    scale: torch.Tensor | None

    def rounded(self, weight: torch.Tensor) -> torch.Tensor:
        """Return fp32 ``weight`` as the artifact will hold it, in fp32; gradients pass through unchanged.

        bf16(weight · scale) ÷ scale is the weight of a model whose BatchNorm is folded. The product is rounded from
        fp64 to fp32 to bf16, as in a conversion. Converting the result gives the same bf16 values.
        """
        value = held = weight.detach()
        if self.rounds and self.scale is None:
            held = value.bfloat16().float()
        elif self.rounds and self.scale is not None:
            scale = self.scale.to(value.device)
            held = ((value.double() * scale).float().bfloat16().double() / scale).float()
        return held + (weight - value)  # + 0, with the gradient of `weight` (Y. Bengio et al. 2013: straight-through)


def find_trainable(
    module: torch.nn.Module, checkpoint: Mapping[str, Array], artifact: Artifact
) -> Iterator[TrainedParameter]:
    """Yield what can be trained of ``module``, which was made from ``checkpoint``; ``artifact`` tells what is rounded.

    Parameters are found in the checkpoint by value, because readers change names. Not trained are those that no tensor
    holds unchanged, and those by which BatchNorm scales the weights before it: the artifact rounds their product.
    """
    entries = {entry.name: entry for entry in artifact.manifest.checkpoint}
    stored = {entry.name: entry for entry in artifact.manifest.tensors}
    folded = {entry.name for entry in artifact.manifest.plan.tensors if entry.code == "reference_only"}
    folded |= {name for name, entry in stored.items() if entry.file == RESIDUAL}  # too small for the files of weights
    by_values: dict[str, list[str]] = defaultdict(list)
    for name in entries:
        if "float" in checkpoint[name].dtype.name:
            by_values[digest({"": checkpoint[name].astype(np.float32, copy=False)})].append(name)
    normalises = {name for name, part in module.named_modules() if isinstance(part, _NORMS)}
    names: dict[torch.Tensor, list[str]] = defaultdict(list)
    for name, parameter in module.named_parameters(remove_duplicate=False):
        if parameter.is_floating_point():
            names[parameter].append(name)
    for held, own in names.items():
        candidates = by_values.get(digest({"": in_numpy(held)}), [])
        tensors = tuple(dict.fromkeys(found for name in own for found in _most_similar(name, candidates)))
        # BatchNorm may scale a weight by a tensor that no profile reads and that is no shift.
        scales = any(entries[name].tensor in folded for name in tensors) and not any(n.endswith("bias") for n in own)
        if not tensors or (scales and not any(name.rpartition(".")[0] in normalises for name in own)):
            continue
        tensor, order = stored[entries[tensors[0]].tensor], entries[tensors[0]].permutation
        scale = None
        if tensor.scale is not None and tensor.scale_axis is not None:
            shape = [1] * held.ndim
            shape[tensor.scale_axis if order is None else order[tensor.scale_axis]] = -1
            scale = torch.from_numpy(np.array(artifact.tensor(tensor.scale), np.float64)).reshape(shape)
        yield TrainedParameter(tuple(own), tensors, tensor.dtype == "bfloat16", scale)


def _most_similar(name: str, candidates: Sequence[str]) -> list[str]:
    """Return the one of ``candidates`` whose name ends most like ``name``, part by part; none if several do.

    It tells apart tensors of equal values, such as two biases of zeros.
    """
    parts = name.split(".")[::-1]

    def common_end(other: str) -> int:
        pairs = zip(parts, other.split(".")[::-1], strict=False)
        return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))

    most = max(map(common_end, candidates), default=0)
    found = [other for other in candidates if common_end(other) == most]
    return found if len(found) == 1 else []


def recovered_tensors(
    module: torch.nn.Module, checkpoint: Mapping[str, Array], trained: Sequence[TrainedParameter], state: State
) -> dict[str, Array]:
    """Return ``checkpoint`` with the values of ``state``, in its dtypes, and copy them to ``module``.

    They are rounded, so that bf16 loses nothing of what the fp32 checkpoint of the artifact holds.
    """
    found = dict(checkpoint)
    for entry in trained:
        value = in_numpy(entry.rounded(state[entry.names[0]]))
        found |= {tensor: value.astype(checkpoint[tensor].dtype) for tensor in entry.tensors}
        with torch.no_grad():
            module.get_parameter(entry.names[0]).copy_(to_torch(found[entry.tensors[0]]))
    return found


def digest(tensors: Mapping[str, Array]) -> str:
    """Return the sha256 over names, dtypes, shapes and bytes of all ``tensors``, in order of their names."""
    found = hashlib.sha256()
    for name in sorted(tensors):
        found.update(f"{name}\0{tensors[name].dtype.name}\0{tensors[name].shape}\n".encode())
        found.update(np.ascontiguousarray(tensors[name]).reshape(-1).view(np.uint8).data)
    return found.hexdigest()


def in_numpy(tensor: torch.Tensor) -> Array:
    """Return ``tensor`` in fp32."""
    return np.asarray(tensor.detach().cpu().float().contiguous().numpy())
