"""Selects the model's tensors from a checkpoint by the prefix of their names.

A LightningModule holds the wanted network beside losses, metrics, teachers and averages of itself.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from typing import TYPE_CHECKING

from bf16kit.messages.errors import SourceError, UsageError
from bf16kit.messages.wording import first_few
from converter.read.statedict import fit, mismatch_message, mismatches
from converter.source import Array

if TYPE_CHECKING:
    import torch

_COMPILED = "_orig_mod."  # torch.compile's prefix for the names of what it wraps, at any position
_AVERAGED = re.compile(r"(^|[._])(ema|swa|avg|averaged?|shadow)([._]|$)", re.IGNORECASE)
_NAMED = 5


def fit_behind_prefix(module: torch.nn.Module, tensors: Mapping[str, Array], weights: str | None = None) -> list[str]:
    """Copy the tensors that :func:`select` chooses into ``module``; return its notes, raise its errors."""
    chosen, notes = select(module.state_dict(), tensors, weights)
    fit(module, chosen)
    return notes


def select(
    state: Mapping[str, torch.Tensor], tensors: Mapping[str, Array], weights: str | None = None
) -> tuple[dict[str, Array], list[str]]:
    """Return the ``tensors`` with one prefix that fill ``state``, by its names, and notes on the choice.

    ``weights`` chooses between several prefixes: ``ema`` one that names an average, ``model`` another one, any other
    value is the prefix itself. Without it, trained weights are preferred to averaged ones.

    Raises :class:`UsageError` when the user must choose or chose an unknown prefix, and :class:`SourceError` when
    nothing fits, naming what is missing or has another shape.
    """
    bare = _without_compiled(tensors, state)
    ranked = _prefixes(bare, state)
    fitting = [prefix for prefix in ranked if not any(mismatches(_with_prefix(bare, prefix), state))]
    prefix = _choose_prefix(fitting, ranked, weights)
    chosen = _with_prefix(bare, prefix)
    problems = list(mismatches(chosen, state))
    if problems:
        raise SourceError(mismatch_message("the checkpoint does not fit the model", problems))
    others = [other for other in fitting if other != prefix]
    return chosen, list(_notes(prefix, others, [name for name in bare if not name.startswith(prefix)]))


def _without_compiled(tensors: Mapping[str, Array], state: Mapping[str, torch.Tensor]) -> dict[str, Array]:
    if any(_COMPILED in name for name in state):
        return dict(tensors)
    return {name.replace(_COMPILED, ""): tensor for name, tensor in tensors.items()}


def _prefixes(tensors: Mapping[str, Array], state: Mapping[str, torch.Tensor]) -> list[str]:
    """Return every prefix of the model's names, those with most names first, then shorter ones."""
    found: Counter[str] = Counter()
    depth = max((name.count(".") for name in state), default=0)
    for name in tensors:
        start = len(name) + 1
        # No deeper than the model's own names, because a hostile name may contain a million dots.
        for _ in range(depth + 1):
            start = name.rfind(".", 0, max(start - 1, 0)) + 1
            if name[start:] in state:
                found[name[:start]] += 1
            if not start:
                break
    return sorted(found, key=lambda prefix: (-found[prefix], len(prefix), prefix))


def _with_prefix(tensors: Mapping[str, Array], prefix: str) -> dict[str, Array]:
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}


def _choose_prefix(fitting: list[str], ranked: list[str], weights: str | None) -> str:
    averaged = [prefix for prefix in fitting if _AVERAGED.search(prefix)]
    trained = [prefix for prefix in fitting if prefix not in averaged]
    if weights is not None and weights not in ("ema", "model"):
        return _named_prefix(weights, ranked)
    if weights == "ema" and fitting and not averaged:
        raise UsageError("--weights ema: the checkpoint holds no averaged weights of this model; leave it out")
    candidates = averaged if weights == "ema" else trained or averaged
    if len(candidates) > 1 and "" not in candidates:
        shown = ", ".join(repr(prefix) for prefix in candidates[:_NAMED])
        raise UsageError(
            f"the checkpoint has weights of this model under several prefixes, {shown}; choose one, such as"
            f" --weights {candidates[0]}"
        )
    if candidates:
        return "" if "" in candidates else candidates[0]
    return ranked[0] if ranked else ""


def _named_prefix(weights: str, ranked: list[str]) -> str:
    prefix = weights if weights.endswith(".") or not weights else f"{weights}."
    if prefix not in ranked:
        shown = ", ".join(repr(found) for found in ranked[:_NAMED]) or "none"
        raise UsageError(f"--weights {weights}: no tensor of the model has the prefix {prefix!r}; found: {shown}")
    return prefix


def _notes(prefix: str, others: list[str], remaining: list[str]) -> list[str]:
    notes = []
    if prefix:
        notes.append(f"the model's weights are those whose names begin with {prefix!r}")
    if others:
        shown = ", ".join(repr(other) for other in others[:_NAMED])
        notes.append(f"the checkpoint also has weights of this model under {shown}; --weights PREFIX takes those")
    unused = [name for name in remaining if not any(name.startswith(other) for other in others if other)]
    if unused:
        notes.append(f"tensors that the model does not use, stored only for restore: {first_few(unused, _NAMED)}")
    return notes
