"""A Hugging Face model directory: the architecture from config.json, the weights from its own files."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from bf16kit.errors import SourceError, UsageError
from bf16kit.tensors import TensorSpec
from converter.model import Array, Feeds, Sampler, TorchModel
from converter.options import Options
from converter.process.quiet import first_line, quiet
from converter.sources import safetensors_file, torch_file
from converter.sources.detect import Kind
from converter.sources.statedict import mismatch_message, to_torch
from converter.sources.torch.onnx_export import adapt

_BATCH, _SEQ = "batch", "seq"
_SEQ_RANGE = (4, 64)  # tokens per sample in generated feeds


def read_tensors(path: Path) -> tuple[dict[str, Array], list[Path]]:
    """Every tensor of the directory's checkpoint, and the files it is made of (config.json first)."""
    config = path / "config.json"
    single, index = path / "model.safetensors", path / "model.safetensors.index.json"
    if single.is_file():
        return safetensors_file.read_file(single), [config, single]
    if index.is_file():
        tensors, files = safetensors_file.read_sharded(index)
        return tensors, [config, *files]
    pickled = path / "pytorch_model.bin"
    if pickled.is_file():
        tensors, _ = torch_file.read_file(pickled, Kind.TORCH_ZIP, trust_pickle=False)
        return tensors, [config, pickled]
    raise SourceError(f"{path}: has a config.json, but neither model.safetensors, its index, nor pytorch_model.bin")


def load(options: Options, tensors: Mapping[str, Array]) -> tuple[TorchModel, Sampler | None]:
    """The model of the directory over the memory of ``tensors``, adapted to positional inputs, and a sampler for it."""
    config = _config(options.source)
    module = _load_module(options.source, config, tensors)
    inputs = options.inputs or _inputs(module, config)
    model = adapt(module, inputs)
    sampler = _sampler(config, inputs) if any(spec.name == "input_ids" for spec in inputs) else None
    return model, sampler


def output_kind(options: Options, spec: TensorSpec) -> TensorSpec:
    """``spec`` with the kind that the config gives it: a head that regresses also calls its output logits."""
    config = _config(options.source)
    regresses = config.get("problem_type") == "regression" or len(config.get("id2label", {}) or {}) == 1
    return replace(spec, kind="regression") if spec.kind == "logits" and regresses else spec


def _config(path: Path) -> dict[str, Any]:
    try:
        config = json.loads((path / "config.json").read_bytes())
    except ValueError as error:
        raise SourceError(f"{path / 'config.json'}: not JSON: {error}") from None
    if not isinstance(config, dict) or "model_type" not in config:
        raise SourceError(f"{path / 'config.json'}: has no model_type, so this is not a transformers model")
    return config


def _load_module(path: Path, config: Mapping[str, Any], tensors: Mapping[str, Array]) -> Any:
    """The fp32 module with eager attention, whose graph is plain MatMul and Softmax; an unused pooler is left out."""
    try:
        import transformers
    except ImportError:
        raise UsageError("a Hugging Face directory needs transformers: pip install 'bf16kit[hf]'") from None
    import torch

    try:
        with quiet():
            parsed = transformers.AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=False)
            factory = _class(path, config, parsed)
            module, info = factory.from_pretrained(
                None,  # not the path: transformers would map the file a second time
                config=parsed,
                state_dict={name: to_torch(tensor) for name, tensor in tensors.items()},
                dtype=torch.float32,
                attn_implementation="eager",
                ignore_mismatched_sizes=True,  # `_check_fit` names them
                output_loading_info=True,
            )
    except SourceError:
        raise
    except Exception as error:  # transformers lets errors of any kind through
        raise SourceError(f"{path}: transformers cannot load it: {first_line(error)}") from error
    _check_fit(path, info)
    if getattr(module, "pooler", None) is not None:
        module.pooler = None  # nothing we serve reads it; its weights stay in the checkpoint that `restore` gives back
    module.config.use_cache = False
    module.config.return_dict = True
    return module


def _class(path: Path, config: Mapping[str, Any], parsed: Any) -> Any:
    """The architecture's class: the bare model for sentence-transformers directories and where config.json has none."""
    import transformers

    architecture = next(iter(config.get("architectures") or []), "")
    if architecture and not architecture.endswith("Model") and not (path / "modules.json").is_file():
        found = getattr(transformers, architecture, None)
    else:
        found = transformers.MODEL_MAPPING.get(type(parsed), None)
    if found is None:
        raise SourceError(f"{path}: its architecture {architecture or parsed.model_type} is not one transformers knows")
    return found[0] if isinstance(found, tuple | list) else found


def _check_fit(path: Path, info: Mapping[str, Any]) -> None:
    """transformers fills what it does not find with random numbers and warns; here that is an error."""
    problems = [f"missing: {name}" for name in sorted(info["missing_keys"]) if not name.startswith("pooler.")]
    problems += [f"shape: {found[0]} is {list(found[1])}, not {list(found[2])}" for found in info["mismatched_keys"]]
    if problems:
        raise SourceError(mismatch_message(f"{path}: the checkpoint does not fit its config.json", problems))


def _inputs(module: Any, config: Mapping[str, Any]) -> tuple[TensorSpec, ...]:
    import inspect

    parameters = inspect.signature(module.forward).parameters
    if module.main_input_name == "input_ids" and not config.get("is_encoder_decoder"):
        names = ["input_ids", "attention_mask"]
        if "token_type_ids" in parameters and int(config.get("type_vocab_size") or 0) > 1:
            names.append("token_type_ids")
        return tuple(TensorSpec(name, "int64", (_BATCH, _SEQ)) for name in names)
    if module.main_input_name == "pixel_values" and isinstance(config.get("image_size"), int):
        size, channels = config["image_size"], int(config.get("num_channels") or 3)
        return (TensorSpec("pixel_values", "float32", (_BATCH, channels, size, size)),)
    raise UsageError(
        f"the inputs of a {config['model_type']} model cannot be told from its config; name them with"
        f" --input {module.main_input_name}:DTYPE:DIMS"
    )


def _sampler(config: Mapping[str, Any], inputs: Sequence[TensorSpec]) -> Sampler:
    """Token ids drawn from the vocabulary, of varied lengths, padded at the right as a tokenizer does."""
    vocabulary = int(config.get("vocab_size") or 2)
    pad = int(config.get("pad_token_id") or 0)
    longest = min(_SEQ_RANGE[1], int(config.get("max_position_embeddings") or _SEQ_RANGE[1]))
    specs = {spec.name: spec for spec in inputs}

    def sample(seed: int, count: int) -> Iterator[Feeds]:
        random = np.random.default_rng(seed)
        for _ in range(count):
            seq = _fixed(specs["input_ids"], 1) or int(random.integers(min(_SEQ_RANGE[0], longest), longest + 1))
            rows = _fixed(specs["input_ids"], 0) or 2
            lengths = random.integers(max(1, seq // 2), seq + 1, rows)
            lengths[0] = seq
            mask = np.arange(seq) < lengths[:, None]
            ids = np.where(mask, random.integers(0, vocabulary, (rows, seq)), pad)
            yield {name: _values(spec, ids, mask) for name, spec in specs.items()}

    return sample


def _values(spec: TensorSpec, ids: Array, mask: Array) -> Array:
    values = {"input_ids": ids, "attention_mask": mask}.get(spec.name, np.zeros_like(ids))
    return np.ascontiguousarray(values.astype(spec.dtype))


def _fixed(spec: TensorSpec, axis: int) -> int:
    dim = spec.shape[axis] if len(spec.shape) > axis else 0
    return dim if isinstance(dim, int) else 0
