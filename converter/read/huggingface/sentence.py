"""The sentence-transformers modules after a transformer, read from its files: pooling, projection, normalisation."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from bf16kit.messages.errors import SourceError
from converter.process.quiet import quiet
from converter.read.huggingface.directory import Directory, SentenceModule
from converter.read.statedict import mismatch_message, to_torch
from converter.source import Array

Feeds = dict[str, torch.Tensor]
# The switches of older files, one per pooling mode.
_SWITCHES = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}
_TINY = 1e-9  # sentence-transformers' lower bound for the number of tokens
_NORM_TINY = 1e-12  # torch's lower bound for a norm


class Sentence(torch.nn.Module):
    """``transformer``, then the modules that make one embedding of its tokens; called with one mapping of feeds."""

    def __init__(self, transformer: torch.nn.Module, steps: list[torch.nn.Module]) -> None:
        super().__init__()
        self.transformer = transformer
        self.steps = torch.nn.ModuleList(steps)

    def forward(self, feeds: Feeds) -> Feeds:
        tokens: torch.Tensor = self.transformer(**feeds).last_hidden_state
        mask = feeds.get("attention_mask")
        value = tokens
        for step in self.steps:
            value = step(value, torch.ones(tokens.shape[:2]) if mask is None else mask)
        return {"last_hidden_state": tokens, "sentence_embedding": value}


def sentence(directory: Directory, transformer: torch.nn.Module, tensors: Mapping[str, Array]) -> Sentence:
    """Return the whole model of a sentence-transformers directory.

    Raises :class:`SourceError` naming a module that is not supported, or whose weights do not fit.
    """
    return Sentence(transformer, [step for part in directory.parts or () for step in _steps(part, tensors)])


def by_library(directory: Directory, transformer: torch.nn.Module) -> Sentence | None:
    """Return the same model with the modules that sentence-transformers itself loads; None if it is not installed.

    It is for the oracle: :func:`sentence` computes what these modules compute in a form that can be exported.
    """
    try:
        with quiet():
            from sentence_transformers.sentence_transformer import modules
    except ImportError:
        return None
    found: list[torch.nn.Module] = []
    for part in directory.parts or ():
        with quiet():
            own = getattr(modules, part.kind).load(
                str(part.path.parent), subfolder=part.path.name, local_files_only=True
            )
        found.append(_LibraryStep(own.float().eval()))
    return Sentence(transformer, found)


class _LibraryStep(torch.nn.Module):
    """A module of sentence-transformers, called as those of this file are."""

    def __init__(self, module: torch.nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, value: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        features = {"token_embeddings": value, "sentence_embedding": value, "attention_mask": mask}
        result: torch.Tensor = self.module(features)["sentence_embedding"]
        return result


def _steps(part: SentenceModule, tensors: Mapping[str, Array]) -> list[torch.nn.Module]:
    if part.kind == "Dropout":
        return []
    if part.kind == "Normalize":
        return [_Normalize()]
    if part.kind == "Pooling":
        return [_Pooling(_modes(part))]
    if part.kind == "Dense":
        return [_dense(part, tensors)]
    raise SourceError(
        f"{part.path.parent / 'modules.json'}: a {part.kind} module is not supported (Pooling, Dense, Normalize and"
        " Dropout are); to convert the transformer alone, convert a copy of the directory without modules.json"
    )


class _Pooling(torch.nn.Module):
    """Pools tokens [batch, seq, width] where the mask [batch, seq] is nonzero to a vector [batch, modes * width]."""

    def __init__(self, modes: tuple[str, ...]) -> None:
        super().__init__()
        self.modes = modes

    def forward(self, tokens: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return torch.cat([_POOLINGS[mode](tokens, mask) for mode in self.modes], dim=-1)


def _mean(tokens: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    weights = mask.unsqueeze(-1).to(tokens.dtype)
    return (tokens * weights).sum(dim=1) / weights.sum(dim=1).clamp(min=_TINY)


def _mean_by_root(tokens: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    weights = mask.unsqueeze(-1).to(tokens.dtype)
    return (tokens * weights).sum(dim=1) / weights.sum(dim=1).clamp(min=_TINY).sqrt()


def _weighted_mean(tokens: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Return a mean in which later tokens weigh more: the n-th token that is not padding has weight n."""
    weights = (mask.cumsum(dim=1) * mask).unsqueeze(-1).to(tokens.dtype)
    return (tokens * weights).sum(dim=1) / weights.sum(dim=1).clamp(min=_TINY)


def _max(tokens: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return tokens.masked_fill(mask.unsqueeze(-1) == 0, float("-inf")).amax(dim=1)


def _first(tokens: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Return the first token that is not padding; padding may be at the left."""
    return _at(tokens, mask.to(torch.int32).argmax(dim=1))


def _last(tokens: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    places = torch.arange(tokens.shape[1], dtype=torch.int64).unsqueeze(0)
    return _at(tokens, (mask * places).amax(dim=1))


def _at(tokens: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    index = places.to(torch.int64).reshape(-1, 1, 1).expand(-1, 1, tokens.shape[-1])
    return tokens.gather(1, index).squeeze(1)


_POOLINGS = {
    "cls": _first,
    "max": _max,
    "mean": _mean,
    "mean_sqrt_len_tokens": _mean_by_root,
    "weightedmean": _weighted_mean,
    "lasttoken": _last,
}


def _modes(part: SentenceModule) -> tuple[str, ...]:
    stated: Any = part.config.get("pooling_mode")
    if stated is None:
        stated = [mode for switch, mode in _SWITCHES.items() if part.config.get(switch)] or "mean"
    modes = (stated,) if isinstance(stated, str) else tuple(stated)
    for mode in modes:
        if mode not in _POOLINGS:
            raise SourceError(
                f"{part.path / 'config.json'}: pooling mode {mode!r} is unknown; known: {', '.join(_POOLINGS)}"
            )
    return modes


class _Normalize(torch.nn.Module):
    def forward(self, value: torch.Tensor, _mask: torch.Tensor) -> torch.Tensor:
        return value / value.square().sum(dim=-1, keepdim=True).sqrt().clamp(min=_NORM_TINY)


class _Dense(torch.nn.Module):
    def __init__(self, linear: torch.nn.Linear, activation: torch.nn.Module) -> None:
        super().__init__()
        self.linear, self.activation = linear, activation

    def forward(self, value: torch.Tensor, _mask: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.activation(self.linear(value))
        return result


def _dense(part: SentenceModule, tensors: Mapping[str, Array]) -> _Dense:
    where, config = part.path / "config.json", part.config
    if config.get("use_residual") or config.get("module_input_name", "sentence_embedding") != "sentence_embedding":
        raise SourceError(f"{where}: a Dense module with a residual or another input is not supported")
    name = str(config.get("activation_function", "torch.nn.modules.activation.Tanh")).rpartition(".")[2]
    if name not in (*torch.nn.modules.activation.__all__, "Identity"):
        raise SourceError(f"{where}: activation_function {name!r} is not one of torch.nn's")
    own = {name.removeprefix(part.prefix): to_torch(t) for name, t in tensors.items() if name.startswith(part.prefix)}
    weight = own.get("linear.weight")
    if weight is None or weight.ndim != 2:
        raise SourceError(mismatch_message(f"{part.path}: its weights do not fit", ["missing: linear.weight"]))
    linear = torch.nn.Linear(weight.shape[1], weight.shape[0], bias="linear.bias" in own)
    try:
        linear.load_state_dict({key.removeprefix("linear."): tensor for key, tensor in own.items()})
        return _Dense(linear, getattr(torch.nn, name)())
    except (RuntimeError, TypeError) as error:
        raise SourceError(f"{part.path}: its weights do not fit: {error}") from error
