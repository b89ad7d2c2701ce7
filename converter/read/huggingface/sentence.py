"""A sentence-transformers directory: the library's own modules make one embedding of the transformer's tokens."""

from __future__ import annotations

import json
from typing import Any

import torch

from bf16kit.messages.errors import SourceError
from converter.process.quiet import first_line, quiet
from converter.read.huggingface.model_directory import Directory, SentenceModule

_KNOWN = ("Pooling", "Dense", "Normalize", "Dropout")


class Sentence(torch.nn.Module):
    """``transformer``, then ``steps`` of the library; called with one mapping of feeds."""

    def __init__(self, transformer: torch.nn.Module, steps: list[torch.nn.Module]) -> None:
        super().__init__()
        self.transformer = transformer
        self.steps = torch.nn.ModuleList(steps)

    def forward(self, feeds: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        tokens: torch.Tensor = self.transformer(**feeds).last_hidden_state
        features = {"token_embeddings": tokens, **{name: feeds[name] for name in feeds if name == "attention_mask"}}
        for step in self.steps:
            features = step(features)
        return {"last_hidden_state": tokens, "sentence_embedding": features["sentence_embedding"]}


def sentence(directory: Directory, transformer: torch.nn.Module) -> Sentence | None:
    """Return the whole model of a sentence-transformers directory; None if the library is not installed.

    Raises :class:`SourceError` naming a module that is not supported, or that the library cannot load.
    """
    for part in directory.parts or ():
        if part.kind not in _KNOWN:
            raise SourceError(
                f"{part.path.parent / 'modules.json'}: a {part.kind} module is not supported ({', '.join(_KNOWN)} are);"
                " to convert the transformer alone, convert a copy of the directory without modules.json"
            )
    try:
        with quiet():
            from sentence_transformers.sentence_transformer import modules
    except ImportError:
        return None
    return Sentence(transformer, [_load(modules, part) for part in directory.parts or ()])


def _load(modules: Any, part: SentenceModule) -> torch.nn.Module:
    if part.kind == "Dense":
        activation = str(
            json.loads((part.path / "config.json").read_bytes()).get("activation_function", "torch.nn.Tanh")
        )
        if not activation.startswith("torch.nn."):  # the library would take another one in its place
            raise SourceError(
                f"{part.path / 'config.json'}: activation_function {activation!r} is not one of torch.nn's"
            )
    try:
        with quiet():
            kind = getattr(modules, part.kind)
            found = kind.load(str(part.path.parent), subfolder=part.path.name, local_files_only=True)
    except Exception as error:  # the library raises errors of any kind
        raise SourceError(f"{part.path}: sentence-transformers cannot load it: {first_line(error)}") from error
    module: torch.nn.Module = found.float().eval()
    return module
