"""The torch module of a directory: the class that its config.json names, over the memory of its checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bf16kit.messages.errors import SourceError, UsageError
from bf16kit.messages.wording import first_few
from converter.process.quiet import first_line, quiet
from converter.read.huggingface.directory import Directory
from converter.read.huggingface.experts import register
from converter.read.statedict import mismatch_message, to_torch
from converter.source import Array


def load_module(directory: Directory, tensors: Mapping[str, Array], scratch: Path) -> tuple[Any, list[str]]:
    """Return the fp32 module with eager attention, whose graph is plain MatMul and Softmax, and notes for its owner.

    Its fp32 weights share the memory of ``tensors``; widened ones are in temporary files in ``scratch``.
    """
    try:
        import transformers
    except ImportError:
        raise UsageError("a Hugging Face directory needs transformers: pip install 'bf16kit[hf]'") from None
    import torch

    path = directory.path
    try:
        with quiet():
            parsed = transformers.AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=False)
            factory = _class(directory, parsed)
            module, info = factory.from_pretrained(
                None,  # not the path: transformers would map the file a second time
                config=parsed,
                state_dict=_in_fp32(tensors, scratch),
                dtype=torch.float32,
                attn_implementation="eager",
                experts_implementation=register(),
                ignore_mismatched_sizes=True,  # `_check_fit` reports them
                output_loading_info=True,
            )
    except SourceError:
        raise
    except Exception as error:  # transformers raises errors of any kind
        raise SourceError(f"{path}: transformers cannot load it: {first_line(error)}") from error
    _check_fit(path, info)
    notes = [*_unused(info, module), *_without_pooler(directory, info, module)]
    return module, notes


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


def _check_fit(path: Path, info: Mapping[str, Any]) -> None:
    """Raise SourceError for missing or mismatched weights.

    ``transformers`` would only warn, and fill them with random numbers.
    """
    problems = [f"missing: {name}" for name in sorted(info["missing_keys"]) if not name.startswith("pooler.")]
    problems += [f"shape: {found[0]} is {list(found[1])}, not {list(found[2])}" for found in info["mismatched_keys"]]
    if problems:
        raise SourceError(mismatch_message(f"{path}: the checkpoint does not fit its config.json", problems))


def _unused(info: Mapping[str, Any], module: Any) -> list[str]:
    unexpected = sorted(info["unexpected_keys"])
    if not unexpected:
        return []
    return [
        f"{type(module).__name__} does not use {len(unexpected)} of the checkpoint's tensors"
        f" ({first_few(unexpected)}); no graph uses them, and restore gives them back"
    ]


def _without_pooler(directory: Directory, info: Mapping[str, Any], module: Any) -> list[str]:
    """Remove a pooler that has no weights, or that sentence-transformers does not use."""
    missing = any(name.startswith("pooler.") for name in info["missing_keys"])
    if getattr(module, "pooler", None) is None or (directory.parts is None and not missing):
        return []
    module.pooler = None
    if not missing:
        return []
    return [f"the checkpoint has no pooler, so {type(module).__name__} gives no pooler_output"]
