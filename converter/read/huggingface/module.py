"""The torch module of a directory: the class that its config.json names, over the memory of its checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bf16kit.messages.errors import SourceError, UsageError
from bf16kit.messages.wording import first_few
from converter.process.quiet import first_line, quiet
from converter.read.huggingface.experts import register
from converter.read.huggingface.model_directory import Directory
from converter.read.statedict import mismatch_message, to_torch
from converter.source import Array

_EXTRAS = ("use_cache", "output_hidden_states", "output_attentions")


def load_module(directory: Directory, tensors: Mapping[str, Array], scratch: Path) -> tuple[Any, list[str]]:
    """Return the fp32 module with eager attention, whose graph is plain MatMul and Softmax, and notes for its owner.

    Its fp32 weights share the memory of ``tensors``; widened ones are in temporary files in ``scratch``.
    """
    try:
        import transformers
    except ImportError:
        raise UsageError("a Hugging Face directory needs transformers: pip install 'bf16kit[hf]'") from None
    import torch

    path, prefixes = directory.path, tuple(part.prefix for part in directory.parts or ())
    own = {name: tensor for name, tensor in tensors.items() if not (prefixes and name.startswith(prefixes))}
    try:
        with quiet():
            parsed = transformers.AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=False)
            module, info = _class(directory, parsed).from_pretrained(
                None,  # not the path: transformers would map the file a second time
                config=parsed,
                state_dict=_in_fp32(own, scratch),
                dtype=torch.float32,
                attn_implementation="eager",
                experts_implementation=register(),
                ignore_mismatched_sizes=True,  # reported below
                output_loading_info=True,
            )
    except SourceError:
        raise
    except Exception as error:  # transformers raises errors of any kind
        raise SourceError(f"{path}: transformers cannot load it: {first_line(error)}") from error
    # transformers only warns about missing and mismatched weights, and fills them with random numbers.
    missing = sorted(info["missing_keys"])
    problems = [f"missing: {name}" for name in missing if not name.startswith("pooler.")]
    problems += [f"shape: {found[0]} is {list(found[1])}, not {list(found[2])}" for found in info["mismatched_keys"]]
    if problems:
        raise SourceError(mismatch_message(f"{path}: the checkpoint does not fit its config.json", problems))
    notes, unused, name = [], sorted(info["unexpected_keys"]), type(module).__name__
    if unused:
        notes.append(
            f"{name} does not use {len(unused)} of the checkpoint's tensors ({first_few(unused)}); no graph uses them,"
            " and restore gives them back"
        )
    # sentence-transformers does not use a pooler
    if getattr(module, "pooler", None) is not None and (missing or directory.parts is not None):
        module.pooler = None
        notes += [f"the checkpoint has no pooler, so {name} gives no pooler_output"] if missing else []
    return module, notes


def leave_out_extras(module: Any) -> None:
    """Make ``module`` return neither a cache nor a list of every layer's states, whatever its configs say."""
    for part in module.modules():
        for name in _EXTRAS:
            if getattr(getattr(part, "config", None), name, False):
                setattr(part.config, name, False)


def _in_fp32(tensors: Mapping[str, Array], scratch: Path) -> dict[str, Any]:
    """Return torch tensors over the memory of ``tensors``, or over files: transformers would widen them in memory."""
    from converter.process.tensorfiles import TensorFiles

    with TensorFiles(scratch):
        found = {name: to_torch(tensor) for name, tensor in tensors.items()}
        return {name: tensor.float() if tensor.is_floating_point() else tensor for name, tensor in found.items()}


def _class(directory: Directory, parsed: Any) -> Any:
    """Return the class that config.json names.

    For sentence-transformers, or if none is named, return the family's base model.
    """
    import transformers

    found: Any
    architecture = next(iter(directory.config.get("architectures") or []), "")
    if architecture and directory.parts is None:
        found = getattr(transformers, str(architecture), None)
    else:
        found = transformers.MODEL_MAPPING.get(type(parsed), None)
        found = found[0] if isinstance(found, tuple | list) else found
        if getattr(parsed, "is_encoder_decoder", False) and directory.parts is not None:  # only its encoder embeds
            name = getattr(found, "__name__", "").removesuffix("Model")
            found = getattr(transformers, f"{name}EncoderModel", found)
    if not isinstance(found, type) or not issubclass(found, transformers.PreTrainedModel):
        what = architecture or parsed.model_type
        raise SourceError(f"{directory.path}: its architecture {what} is not known to the installed transformers")
    return found
