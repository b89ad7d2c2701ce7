"""The torch module of a directory: the class that its config.json names, over the memory of its checkpoint.

With it, the modules of sentence-transformers, and a causal language model's cache as inputs and outputs.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bf16kit.converter.process.quiet import first_line, quiet
from bf16kit.converter.read.huggingface.inputs import BATCH, SEQ
from bf16kit.converter.read.huggingface.model_directory import Directory, SentenceModule
from bf16kit.converter.read.onnx_export import left_out, named_tensors
from bf16kit.converter.read.sources import mismatch_message
from bf16kit.converter.read.statedict import to_torch
from bf16kit.converter.source import Array, Feeds
from bf16kit.messages.errors import SourceError, UsageError
from bf16kit.messages.wording import first_few
from bf16kit.numerics.tensors import TensorSpec

_CACHE, _PAST, _TOTAL = "past_key_values", "past", "total"
CACHES = (_CACHE, "cache")  # what models call it: transformers 5.24 has renamed it
_ROWS, _SEQ_RANGE, _PAST_RANGE = 2, (1, 17), (4, 33)  # the upper ends are excluded
_KNOWN = ("Pooling", "Dense", "Normalize", "Dropout")


def load_module(directory: Directory, tensors: Mapping[str, Array], scratch: Path) -> tuple[Any, list[str]]:
    """Return the fp32 module with eager attention, whose graph is plain MatMul and Softmax, and notes for its owner.

    Its fp32 weights share the memory of ``tensors``; widened ones are in temporary files in ``scratch``.
    """
    try:
        import transformers
    except ImportError:
        raise UsageError("a Hugging Face directory needs transformers: pip install 'bf16kit[hf]'") from None
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    ALL_EXPERTS_FUNCTIONS.register("bf16kit", _experts)
    path, prefixes = directory.path, tuple(part.prefix for part in directory.parts or ())
    own = {name: tensor for name, tensor in tensors.items() if not name.startswith(prefixes)}
    try:
        with quiet():
            parsed = transformers.AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=False)
            module, info = _class(directory, parsed).from_pretrained(
                None,  # not the path: transformers would map the file a second time
                config=parsed,
                state_dict=_in_fp32(own, scratch),
                dtype=torch.float32,
                attn_implementation="eager",
                experts_implementation="bf16kit",
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
    unused, name = sorted(info["unexpected_keys"]), type(module).__name__
    said = f"{name} does not use {len(unused)} of the checkpoint's tensors ({first_few(unused)}); restore returns them"
    notes = [said] if unused else []
    # sentence-transformers does not use a pooler
    if getattr(module, "pooler", None) is not None and (missing or directory.parts is not None):
        module.pooler = None
        notes += [f"the checkpoint has no pooler, so {name} gives no pooler_output"] if missing else []
    return module, notes


def leave_out_extras(module: Any) -> None:
    """Make ``module`` return neither a cache nor a list of every layer's states, whatever its configs say."""
    for config in (part.config for part in module.modules() if hasattr(part, "config")):
        for name in ("use_cache", "output_hidden_states", "output_attentions"):
            if getattr(config, name, False):
                setattr(config, name, False)


def _in_fp32(tensors: Mapping[str, Array], scratch: Path) -> dict[str, Any]:
    """Return torch tensors over the memory of ``tensors``, or over files: transformers would widen them in memory."""
    from bf16kit.converter.process.tensorfiles import TensorFiles

    with TensorFiles(scratch):
        found = {name: to_torch(tensor) for name, tensor in tensors.items()}
        return {name: tensor.float() if tensor.is_floating_point() else tensor for name, tensor in found.items()}


def _class(directory: Directory, parsed: Any) -> Any:
    """Return the class that config.json names, or the family's base model for sentence-transformers and if none is."""
    import transformers

    architecture = str(next(iter(directory.config.get("architectures") or []), ""))
    found: Any
    if architecture and directory.parts is None:
        found = getattr(transformers, architecture, None)
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


def _experts(experts: Any, hidden: torch.Tensor, chosen: torch.Tensor, shares: torch.Tensor) -> torch.Tensor:
    """Return [tokens, width] of ``hidden`` [tokens, width]; ``chosen`` and ``shares`` are [tokens, chosen experts].

    Only an export or a trace gets the products. Otherwise the class's own loop runs, so that the source's answers, with
    which the export is compared, are those of transformers.
    """
    if not (torch.compiler.is_exporting() or torch._C._is_tracing()):
        own: torch.Tensor = type(experts).forward.__wrapped__(experts, hidden, chosen, shares)
        return own
    is_chosen = chosen.unsqueeze(-1) == torch.arange(experts.num_experts)
    share = (is_chosen * shares.unsqueeze(-1)).sum(dim=1)  # [tokens, experts]
    value = _linear(experts, hidden.unsqueeze(0), "gate_up_proj" if experts.has_gate else "up_proj")
    value = experts._apply_gate(value) if experts.has_gate else experts.act_fn(value)
    value = _linear(experts, value, "down_proj")  # [experts, tokens, width]
    if getattr(experts, "has_post_expert_norm", False):
        value = experts.post_expert_norm(value)
    return (value * share.T.unsqueeze(-1)).sum(dim=0).to(hidden.dtype)


def _linear(experts: Any, value: torch.Tensor, name: str) -> torch.Tensor:
    """Return ``value`` [experts or 1, tokens, in] times each expert's matrix, plus its bias: [experts, tokens, out]."""
    matrix = getattr(experts, name)
    product: torch.Tensor = value @ (matrix if experts.is_transposed else matrix.mT)
    return product + getattr(experts, f"{name}_bias").unsqueeze(1) if experts.has_bias else product


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
    for part in (part for part in directory.parts or () if part.kind not in _KNOWN):
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
        config = part.path / "config.json"
        activation = str(json.loads(config.read_bytes()).get("activation_function", "torch.nn.Tanh"))
        if not activation.startswith("torch.nn."):  # the library would take Tanh in its place
            raise SourceError(f"{config}: activation_function {activation!r} is not one of torch.nn's")
    try:
        with quiet():
            kind = getattr(modules, part.kind)
            found = kind.load(str(part.path.parent), subfolder=part.path.name, local_files_only=True)
    except Exception as error:  # the library raises errors of any kind
        raise SourceError(f"{part.path}: sentence-transformers cannot load it: {first_line(error)}") from error
    module: torch.nn.Module = found.float().eval()
    return module


class Cache:
    """The cache of ``module`` as tensors, keys and values by layer, found by running it on three tokens.

    Names are those of the Optimum exporter: ``past_key_values.0.key`` in, ``present.0.key`` out.

    ``specs`` are its tensors, ``spreads`` the standard deviations of their values, by layer and part. ``left_out``
    names what else the model computes and does not serve. Raises :class:`UsageError` for a model that is not a causal
    language model, or whose cache is not just keys and values.
    """

    def __init__(self, module: Any) -> None:
        name = type(module).__name__
        if not is_causal(module):
            raise UsageError(f"--with-past: {name} is not a causal language model; leave the option out")
        with quiet(), torch.no_grad():
            output = module(input_ids=torch.ones((1, 3), dtype=torch.int64), use_cache=True, return_dict=True)
        layers = getattr(output.get(_keyword(module)), "layers", ())
        tensors = {f"{_CACHE}.{n}.{part}": t for n, layer in enumerate(layers) for part, t in _keys_and_values(layer)}
        if not tensors or not all(isinstance(t, torch.Tensor) and t.shape[2:3] == (3,) for t in tensors.values()):
            raise UsageError(f"--with-past: {name} keeps more than keys and values; leave the option out")
        shapes = {name: (BATCH, tensor.shape[1], _PAST, tensor.shape[3]) for name, tensor in tensors.items()}
        self.specs = tuple(TensorSpec(name, "float32", shape) for name, shape in shapes.items())
        self.spreads = [float(tensor.std()) for tensor in tensors.values()]
        self.left_out = tuple(name for name in left_out(output) if name not in CACHES)

    @property
    def inputs(self) -> tuple[TensorSpec, ...]:
        """All inputs of the model: new tokens, the mask over past and new tokens, the cache."""
        tokens = TensorSpec("input_ids", "int64", (BATCH, SEQ)), TensorSpec("attention_mask", "int64", (BATCH, _TOTAL))
        return (*tokens, *self.specs)

    def call(self, module: Any, feeds: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Run ``module`` on the new tokens; a token's position is the number of unmasked tokens before it."""
        from transformers import DynamicCache

        ids, mask = feeds["input_ids"], feeds["attention_mask"]
        tensors = [feeds[spec.name] for spec in self.specs]
        # Without the config, a layer with a sliding window is only masked, and still keeps the whole past.
        cache = DynamicCache(list(zip(tensors[::2], tensors[1::2], strict=True)))
        keyword = _keyword(module)
        given = {"input_ids": ids, "attention_mask": mask, keyword: cache, "use_cache": True, "return_dict": True}
        if "position_ids" in inspect.signature(module.forward).parameters:
            given["position_ids"] = (mask.cumsum(-1) - 1).clamp(min=0)[:, -ids.shape[1] :]
        output = module(**given)
        outputs = dict(named_tensors(output))
        for index, layer in enumerate(output[keyword].layers):
            outputs |= {f"present.{index}.{part}": tensor for part, tensor in _keys_and_values(layer)}
        return outputs

    def samples(self, directory: Directory, seed: int, count: int) -> Iterator[Feeds]:
        """Yield feeds in the middle of a text; the second row starts later and is padded at the left."""
        random = np.random.default_rng(seed)
        for _ in range(count):
            new, past = int(random.integers(*_SEQ_RANGE)), int(random.integers(*_PAST_RANGE))
            mask = np.ones((_ROWS, past + new), np.int64)
            mask[1:, : random.integers(0, past)] = 0
            ids = random.integers(0, directory.number("vocab_size", 2), (_ROWS, new))
            feed: Feeds = {"input_ids": ids, "attention_mask": mask}
            for spec, spread in zip(self.specs, self.spreads, strict=True):
                shape = (_ROWS, int(spec.shape[1]), past, int(spec.shape[3]))
                feed[spec.name] = (random.standard_normal(shape) * spread).astype(np.float32)
            yield feed


def is_causal(module: Any) -> bool:
    """Return whether ``module`` takes a cache and has no encoder."""
    return bool(_keyword(module)) and not getattr(module.config, "is_encoder_decoder", False)


def _keyword(module: Any) -> str:
    """Return the name of the argument and output that is the cache of ``module``; empty if it has none."""
    taken = inspect.signature(module.forward).parameters
    return next((name for name in CACHES if name in taken), "")


def _keys_and_values(layer: Any) -> list[tuple[str, Any]]:
    return [("key", getattr(layer, "keys", None)), ("value", getattr(layer, "values", None))]
