"""What is trained, and on what: the weights as the artifact rounds them, the model, and the user's batches."""

from __future__ import annotations

import itertools
import random
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from bf16kit.artifact.artifact import Artifact
from bf16kit.artifact.manifest import RESIDUAL
from bf16kit.converter.options import import_callable
from bf16kit.converter.process.quiet import describe_user_error, first_line
from bf16kit.converter.read.statedict import to_torch
from bf16kit.converter.recovery import Settings
from bf16kit.converter.source import Array, Feeds, TorchModel, digest_tensors
from bf16kit.messages.errors import InvalidRequest, UsageError
from bf16kit.numerics.tensors import TensorSpec, check_feeds, describe

_SMALLEST_NORM = 1e-12  # squared: an output of zeros has no relative distance
_NORMS = (torch.nn.LayerNorm, torch.nn.GroupNorm, torch.nn.RMSNorm)  # these are folded into no weight

State = dict[str, torch.Tensor]  # values of what is trained, by each parameter's first name
Outputs = Mapping[str, torch.Tensor]
Lesson = tuple[Sequence[torch.Tensor], Outputs]  # inputs, and the fp32 outputs for them
_END = object()  # of a pass over the batches


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
        if not self.rounds:
            return weight
        value = weight.detach()
        if self.scale is None:
            held = value.bfloat16().float()
        else:
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
            by_values[digest_tensors({"": checkpoint[name].astype(np.float32, copy=False)})].append(name)
    normalises = {name for name, part in module.named_modules() if isinstance(part, _NORMS)}
    names: dict[torch.Tensor, list[str]] = defaultdict(list)
    for name, parameter in module.named_parameters(remove_duplicate=False):
        if parameter.is_floating_point():
            names[parameter].append(name)
    for held, own in names.items():
        candidates = by_values.get(digest_tensors({"": in_numpy(held)}), [])
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
    """Return the one of ``candidates`` with the most of ``name``'s last parts; none if several have as many.

    It tells apart tensors of equal values, such as two biases of zeros.
    """
    found, parts = list(candidates), name.split(".")
    for count in range(1, len(parts) + 1):
        end = ".".join(["", *parts[-count:]])
        found = [other for other in found if f".{other}".endswith(end)] or found
    return found if len(found) == 1 else []


class Student:
    """The module of ``model`` with weights for ``trained`` in place of its own; the teacher is the same, with its own.

    Dropout is off and the statistics of BatchNorm are fixed, because the model is trained as it is served.
    """

    def __init__(self, model: TorchModel, trained: Sequence[TrainedParameter], settings: Settings) -> None:
        try:
            self.device = torch.device(settings.device.replace("auto", "cuda" if torch.cuda.is_available() else "cpu"))
            self._module = model.module.requires_grad_(requires_grad=False).to(self.device)
        except (RuntimeError, AssertionError) as error:
            raise UsageError(f"--device {settings.device}: {first_line(error)}; pass auto, cpu or cuda:N") from None
        self._model, self.trained = model, tuple(trained)
        self.dtype = {"16-mixed": torch.float16, "32-true": torch.float32}.get(settings.precision, torch.bfloat16)

    def own_weights(self) -> State:
        """Return copies of the module's own values of what is trained."""
        names = [entry.names[0] for entry in self.trained]
        return {name: self._module.get_parameter(name).float().clone() for name in names}

    def lesson(self, feeds: Feeds, number: int) -> Lesson:
        """Return the inputs of batch ``number`` and its fp32 outputs, from which something can be learned."""
        inputs = [to_torch(feeds[spec.name].copy()).to(self.device) for spec in self._model.inputs]
        with torch.no_grad():
            outputs = self._run({}, inputs)
        for name, output in outputs.items():  # some may be infinite: masked logits
            if output.isnan().any() or not output.isfinite().any():
                wrong = "NaN" if output.isnan().any() else "no finite value"
                raise UsageError(
                    f"--data: batch {number}: the fp32 model gives {wrong} in output {name!r}, so there is nothing to"
                    " learn; leave out the batch, or check its values"
                )
        return inputs, outputs

    def loss(self, weights: State, lesson: Lesson) -> torch.Tensor:
        """Return the mean over outputs and samples of ‖c − r‖² ÷ ‖r‖²; c by ``weights`` as the artifact holds them.

        A sample is a row of the first axis if every output has as many as the first input, else a whole output.
        Elements that are infinite in r, such as masked logits, and integer outputs are left out; UsageError if no
        output holds floats.
        """
        inputs, reference = lesson
        held: dict[str, torch.Tensor] = {}
        for entry in self.trained:
            held |= dict.fromkeys(entry.names, entry.rounded(weights[entry.names[0]].float()))
        batched = all(r.ndim and r.shape[:1] == inputs[0].shape[:1] for r in reference.values())
        rows, distances = len(inputs[0]) if batched else 1, []
        with torch.autocast(self.device.type, self.dtype, enabled=self.dtype != torch.float32):
            outputs = self._run(held, inputs)
            for name, r in reference.items():
                if r.is_floating_point():
                    r, c = (tensor.float().reshape(rows, -1) for tensor in (r, outputs[name]))
                    r, c = torch.where(r.isfinite(), r, 0.0), torch.where(r.isfinite(), c, 0.0)
                    distances.append(((c - r).square().sum(1) / r.square().sum(1).clamp_min(_SMALLEST_NORM)).mean())
        if not distances:
            names = ", ".join(reference)
            raise UsageError(f"no output of the model holds floats, from which a recovery learns: {names}")
        return torch.stack(distances).mean()

    def _run(self, weights: State, inputs: Sequence[torch.Tensor]) -> Outputs:
        found = torch.func.functional_call(self._module, weights, tuple(tensor.clone() for tensor in inputs))
        return dict(zip(self._model.outputs, found, strict=True))


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


def in_numpy(tensor: torch.Tensor) -> Array:
    """Return ``tensor`` in fp32."""
    return np.asarray(tensor.detach().cpu().float().contiguous().numpy())


class Loader:
    """The user's batches, from the function that ``flag`` names and that returns one pass each time it is called.

    A batch is a mapping with an array per input, or a sequence of them in order; for a model with one input, the array
    alone is enough. Labels may follow and are ignored. Arrays are numpy's or torch's.

    Random generators are seeded before each batch, by ``seed`` and its number. So computations between two batches do
    not change the batches, and a resumed recovery sees the same ones.
    """

    def __init__(self, flag: str, given: str, inputs: Sequence[TensorSpec], seed: int) -> None:
        self._name, self._function = f"{flag} {given}", import_callable(flag, given)
        self._inputs, self._seed = tuple(inputs), seed % 2**64
        self._expected = ", ".join(f"{spec.name} {spec.dtype}{describe(spec.shape)}" for spec in inputs)

    def batches(self, number: int) -> Iterator[Feeds]:
        """Yield the batches of pass ``number``.

        Raises :class:`UsageError` for a pass without a batch, for a batch that does not match the model, and for any
        error in the user's code.
        """
        with self._seeded(number, 0, "when called"):
            batches = iter(self._function())
        for index in itertools.count():
            where = f"batch {index}" + (f" of pass {number + 1}" if number else "")
            with self._seeded(number, index + 1, where):
                item = next(batches, _END)
            if item is not _END:
                yield self._feeds(item, f"{self._name}: {where}")
            elif index:
                return
            else:
                raise UsageError(
                    f"{self._name}: yielded nothing in pass {number + 1}; each time it is called it must return a new"
                    f" iterable of batches of {self._expected}"
                )

    @contextmanager
    def _seeded(self, number: int, index: int, where: str) -> Iterator[None]:
        """Run the user's code, which may raise anything; report the error with the user's own file and line."""
        seed = int(np.random.SeedSequence([self._seed, number, index]).generate_state(1)[0])
        random.seed(seed)
        np.random.seed(seed)
        torch.manual_seed(seed)
        try:
            yield
        except (Exception, SystemExit) as error:
            raise UsageError(f"{self._name}: failed, {where}: {describe_user_error(error)}") from error

    def _feeds(self, item: Any, where: str) -> Feeds:
        names = [spec.name for spec in self._inputs]
        parts = item if isinstance(item, tuple | list) else [item]
        if len(parts) in (1, 2) and isinstance(parts[0], Mapping):
            fields = {str(name): value for name, value in parts[0].items() if name in names or name != "labels"}
        elif len(parts) in (len(names), len(names) + 1):
            fields = dict(zip(names, parts, strict=False))
        else:
            raise UsageError(
                f"{where}: has {len(parts)} parts; the model takes {self._expected}, and labels may follow"
            )
        try:
            feeds = {n: np.asarray(v.detach().cpu() if hasattr(v, "detach") else v) for n, v in fields.items()}
            check_feeds(self._inputs, feeds)
        except (InvalidRequest, ValueError, TypeError, RuntimeError) as error:  # such as ragged lists
            raise UsageError(f"{where}: {error if isinstance(error, InvalidRequest) else first_line(error)}") from None
        for name, array in feeds.items():
            if array.size == 0 or (array.dtype.kind in "fV" and np.isnan(array).any()):  # V: bfloat16
                wrong = "holds NaN" if array.size else f"has no elements ({describe(array.shape)})"
                raise UsageError(f"{where}: input {name!r} {wrong}; leave it out")
        return {name: np.asarray(feeds[name], order="C") for name in names}
