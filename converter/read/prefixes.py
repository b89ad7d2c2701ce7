"""Selects the model's tensors from a checkpoint by the prefix of their names.

A LightningModule holds the wanted network beside losses, metrics, teachers and averages of itself.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from typing import TYPE_CHECKING

from bf16kit.messages.errors import UsageError
from bf16kit.messages.wording import first_few
from converter.read.statedict import fit, mismatches
from converter.source import Array

if TYPE_CHECKING:
    import torch

_COMPILED = "_orig_mod."  # torch.compile's prefix for the names of what it wraps, at any position
_AVERAGED = re.compile(r"(^|[._])(ema|swa|avg|averaged?|shadow)([._]|$)", re.IGNORECASE)


def fit_behind_prefix(module: torch.nn.Module, tensors: Mapping[str, Array], weights: str | None = None) -> list[str]:
    """Copy the ``tensors`` with one prefix that fill ``module``, by its names, into it; return notes on the choice.

    ``weights`` chooses between several prefixes: ``ema`` one that names an average, ``model`` another one, any other
    value is the prefix itself. Without it, trained weights are preferred to averaged ones.

    Raises :class:`UsageError` when the user must choose or chose an unknown prefix, and :class:`SourceError` when
    nothing fits, naming what is missing or has another shape.
    """
    state = module.state_dict()
    if not any(_COMPILED in name for name in state):
        tensors = {name.replace(_COMPILED, ""): tensor for name, tensor in tensors.items()}
    found: Counter[str] = Counter()  # by prefix, how many of the model's names it precedes
    for name in tensors:
        parts = name.split(".")
        for start in range(len(parts)):
            found[name.removesuffix(".".join(parts[start:]))] += ".".join(parts[start:]) in state
    ranked = sorted((p for p in found if found[p]), key=lambda prefix: (-found[prefix], len(prefix), prefix)) or [""]
    fitting = [prefix for prefix in ranked if not any(mismatches(_behind(prefix, tensors), state))]
    prefix = _choose(fitting, ranked, weights)
    fit(module, _behind(prefix, tensors))
    others = [other for other in fitting if other != prefix]
    unused = [name for name in tensors if not name.startswith((prefix, *filter(None, others)))]
    notes = [f"the model's weights are those whose names begin with {prefix!r}"] if prefix else []
    if others:
        shown = first_few([*map(repr, others)])
        notes.append(f"the checkpoint also has weights of this model under {shown}; --weights PREFIX takes those")
    if unused:
        notes.append(f"tensors that the model does not use, stored only for restore: {first_few(unused)}")
    return notes


def _behind(prefix: str, tensors: Mapping[str, Array]) -> dict[str, Array]:
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}


def _choose(fitting: list[str], ranked: list[str], weights: str | None) -> str:
    if weights not in (None, "ema", "model"):
        prefix = f"{weights}.".replace("..", ".")
        if prefix in ranked:
            return prefix
        shown = first_few([*map(repr, ranked)])
        raise UsageError(f"--weights {weights}: no tensor of the model has the prefix {prefix!r}; found: {shown}")
    averaged = [prefix for prefix in fitting if _AVERAGED.search(prefix)]
    if weights == "ema" and fitting and not averaged:
        raise UsageError("--weights ema: the checkpoint holds no averaged weights of this model; leave it out")
    trained = [prefix for prefix in fitting if prefix not in averaged]
    candidates = averaged if weights == "ema" else trained or averaged
    if len(candidates) > 1 and "" not in candidates:
        raise UsageError(
            f"the checkpoint has weights of this model under several prefixes, {first_few([*map(repr, candidates)])};"
            f" choose one, such as --weights {candidates[0]}"
        )
    return "" if "" in candidates else (candidates or ranked)[0]
