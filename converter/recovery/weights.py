"""Finds which weights are trained and how the artifact rounds them, and turns them into a checkpoint again.

An artifact of the same model tells how they are rounded: by its plan, and by the factors that BatchNorm multiplied
weights by before rounding (docs/artifact-format.md: ``scale``). A module's parameter is found in the checkpoint by its
values, because readers change names.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from bf16kit.artifact.artifact import Artifact
from bf16kit.artifact.manifest import RESIDUAL, CheckpointEntry, Manifest
from bf16kit.messages.errors import ConversionError
from converter.read.statedict import to_torch
from converter.source import Array

_NORMS = (torch.nn.LayerNorm, torch.nn.GroupNorm, torch.nn.RMSNorm)  # these are folded into no weight
_FLOATS = ("float32", "float64", "float16", "bfloat16")


@dataclass(frozen=True, slots=True)
class TrainedParameter:
    """A parameter of the module, with all its names there, and the checkpoint's ``tensors`` that hold it.

    If ``rounds``, the artifact stores it in bf16, multiplied by ``scale`` (float64, broadcast; None: 1).
    """

    names: tuple[str, ...]
    tensors: tuple[str, ...]
    rounds: bool
    scale: torch.Tensor | None = None


def find_trainable(
    module: torch.nn.Module, checkpoint: Mapping[str, Array], artifact: Artifact
) -> tuple[TrainedParameter, ...]:
    """Return what can be trained of ``module``, which was made from ``checkpoint``, as ``artifact`` was.

    Not trained are parameters that no tensor of the checkpoint holds unchanged. Nor are those by which BatchNorm scales
    the weights before it, because the artifact rounds their product. Raises :class:`ConversionError` if no rounded
    weight is left.
    """
    found = tuple(_find(module, checkpoint, artifact))
    if not any(entry.rounds for entry in found):
        raise ConversionError(
            "recovery has nothing to train: no parameter of the module is an unchanged tensor of the checkpoint that is"
            " stored in bf16; `bf16-convert inspect` lists the stored tensors, and --bf16 REGEX makes more of them bf16"
        )
    return found


def _find(module: torch.nn.Module, checkpoint: Mapping[str, Array], artifact: Artifact) -> Iterator[TrainedParameter]:
    manifest = artifact.manifest
    stored = {entry.name: entry for entry in manifest.checkpoint}
    folded = {entry.name for entry in manifest.plan.tensors if entry.code == "reference_only"}
    folded |= {entry.name for entry in manifest.tensors if entry.file == RESIDUAL}  # too small for the files of weights
    index = _by_values(checkpoint)
    normalises = {name for name, part in module.named_modules() if isinstance(part, _NORMS)}
    names: dict[int, list[str]] = defaultdict(list)
    parameters: dict[int, torch.Tensor] = {}
    for name, named in module.named_parameters(remove_duplicate=False):
        names[id(named)].append(name)
        parameters[id(named)] = named
    for key, parameter in parameters.items():
        if not parameter.is_floating_point():
            continue
        tensors = _holders(names[key], index.get(_digest(_numpy(parameter)), ()))
        entries = [stored[name] for name in tensors if name in stored]
        own = any(name.rpartition(".")[0] in normalises for name in names[key])
        if not entries or (not own and any(_scales(entry, folded, names[key]) for entry in entries)):
            continue
        rounds, scale = _rounding(artifact, manifest, entries[0], parameter.ndim)
        yield TrainedParameter(tuple(names[key]), tuple(tensors), rounds, scale)


def _scales(entry: CheckpointEntry, folded: set[str], names: Sequence[str]) -> bool:
    """Whether BatchNorm may scale a weight by this tensor: no profile reads it, and it is no shift."""
    return entry.tensor in folded and not any(name.endswith("bias") for name in names)


def _rounding(
    artifact: Artifact, manifest: Manifest, entry: CheckpointEntry, rank: int
) -> tuple[bool, torch.Tensor | None]:
    stored = next(tensor for tensor in manifest.tensors if tensor.name == entry.tensor)
    if stored.dtype != "bfloat16":
        return False, None
    if stored.scale is None or stored.scale_axis is None:
        return True, None
    axis = stored.scale_axis if entry.permutation is None else entry.permutation[stored.scale_axis]
    shape = [1] * rank
    shape[axis] = -1
    return True, torch.from_numpy(np.array(artifact.tensor(stored.scale), np.float64)).reshape(shape)


def _by_values(checkpoint: Mapping[str, Array]) -> dict[str, list[str]]:
    index: dict[str, list[str]] = defaultdict(list)
    for name, array in checkpoint.items():
        if array.dtype.name in _FLOATS:
            index[_digest(array.astype(np.float32, copy=False))].append(name)
    return index


def _digest(array: Array) -> str:
    digest = hashlib.sha256(repr(array.shape).encode())
    digest.update(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
    return digest.hexdigest()


def _numpy(parameter: torch.Tensor) -> Array:
    return np.asarray(parameter.detach().cpu().float().contiguous().numpy())


def _holders(names: Sequence[str], candidates: Sequence[str]) -> list[str]:
    """Return, for each of a parameter's ``names``, the most similarly named of the ``candidates`` with its values.

    Tensors of equal values, such as two biases of zeros, are told apart by the longest common end of their names, part
    by part. If two are equally similar, neither is taken.
    """
    found: dict[str, None] = {}
    for name in names:
        ends = sorted(((_common_end(name, candidate), candidate) for candidate in candidates), reverse=True)
        if ends and (len(ends) == 1 or ends[0][0] > ends[1][0]):
            found[ends[0][1]] = None
    return list(found)


def _common_end(a: str, b: str) -> int:
    count = 0
    for left, right in zip(reversed(a.split(".")), reversed(b.split(".")), strict=False):
        if left != right:
            break
        count += 1
    return count


class _StraightThrough(torch.autograd.Function):
    """Rounds in the forward pass; in the backward pass the gradient passes unchanged (Y. Bengio et al. 2013)."""

    @staticmethod
    def forward(_context: Any, weight: torch.Tensor, scale: torch.Tensor | None) -> torch.Tensor:
        return rounded(weight, scale)

    @staticmethod
    def backward(_context: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradients[0], None


def straight_through(weight: torch.Tensor, scale: torch.Tensor | None) -> torch.Tensor:
    """Return ``weight`` as the artifact will hold it; gradients pass through unchanged."""
    found: torch.Tensor = _StraightThrough.apply(weight, scale)
    return found


def rounded(weight: torch.Tensor, scale: torch.Tensor | None) -> torch.Tensor:
    """Return bf16(weight · scale) ÷ scale in the dtype of ``weight``: the weight of a model whose BatchNorm is folded.

    The product is rounded from fp64 to fp32 to bf16, as in a conversion. Converting the result gives the same bf16
    values: half a unit in the last place of fp32 is far from the midpoint between two bf16 values.
    """
    if scale is None:
        return weight.bfloat16().to(weight.dtype)
    product = (weight.double() * scale).float().bfloat16()
    return (product.double() / scale).to(weight.dtype)


def recovered_tensors(
    checkpoint: Mapping[str, Array], trained: Sequence[TrainedParameter], state: Mapping[str, torch.Tensor]
) -> dict[str, Array]:
    """Return ``checkpoint`` with the trained values of ``state`` (by the module's names), in its dtypes and order.

    Values that the artifact rounds are rounded here. Its fp32 checkpoint then holds exactly the trained numbers, and
    bf16 loses nothing.
    """
    found = dict(checkpoint)
    for entry in trained:
        value = state[entry.names[0]]
        if entry.rounds:
            value = rounded(value, entry.scale)
        for tensor in entry.tensors:
            found[tensor] = _numpy(value).astype(checkpoint[tensor].dtype)
    return found


def copy_to_module(
    module: torch.nn.Module, trained: Sequence[TrainedParameter], checkpoint: Mapping[str, Array]
) -> None:
    """Copy the values that ``checkpoint`` holds for ``trained`` into ``module``."""
    parameters = dict(module.named_parameters(remove_duplicate=False))
    with torch.no_grad():
        for entry in trained:
            parameters[entry.names[0]].copy_(to_torch(np.ascontiguousarray(checkpoint[entry.tensors[0]])))


def digest(checkpoint: Mapping[str, Array]) -> str:
    """Return the sha256 over names, dtypes, shapes and bytes of all tensors, in order of their names."""
    total = hashlib.sha256()
    for name in sorted(checkpoint):
        array = checkpoint[name]
        total.update(f"{name}\0{array.dtype.name}\0{array.shape}\0{_digest(array)}\n".encode())
    return total.hexdigest()
