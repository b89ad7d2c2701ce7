"""A Hugging Face model directory: the architecture from config.json, the weights from its own files.

The model's inputs and outputs follow from its class, its configs and its preprocessor's files.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bf16kit.messages.errors import ConversionError, UsageError
from bf16kit.numerics.tensors import TensorSpec
from converter.options import Options
from converter.read.huggingface import inputs as edges
from converter.read.huggingface import samples
from converter.read.huggingface.directory import Directory, weights
from converter.read.torch.onnx_export import adapt, not_served
from converter.source import Array, Oracle, Sampler, TorchModel

if TYPE_CHECKING:
    from converter.read.huggingface.unserved import BasicOutputModule
    from converter.read.torch.positional import Call


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """The model of a directory adapted to positional inputs, a sampler for it, and notes for its owner.

    ``oracle`` is given if the model's own module is not the source itself.
    """

    model: TorchModel
    sampler: Sampler | None
    notes: tuple[str, ...]
    oracle: Oracle | None = None


def read_tensors(path: Path) -> tuple[dict[str, Array], list[Path]]:
    """Return every tensor of the directory's checkpoint, and the files it was read from (config.json first).

    Tensors of sentence-transformers modules after the transformer are prefixed with their module's directory.
    """
    directory = Directory.open(path)
    tensors, files = weights(directory.path)
    for part in directory.parts or ():
        if part.kind == "Dense":
            more, found = weights(part.path)
            tensors |= {part.prefix + name: tensor for name, tensor in more.items()}
            files += found
    return tensors, [*directory.files, *files]


def is_sentence_transformer(path: Path) -> bool:
    """Return whether the directory at ``path`` has sentence-transformers modules after the transformer."""
    return Directory.open(path).parts is not None


def load(options: Options, tensors: Mapping[str, Array]) -> LoadedModel:
    """Build the directory's model over the memory of ``tensors``."""
    from converter.read.huggingface.module import load_module
    from converter.read.huggingface.unserved import BasicOutputModule

    directory = Directory.open(options.source)
    module_prefixes = tuple(part.prefix for part in directory.parts or ())
    own = {
        name: tensor for name, tensor in tensors.items() if not (module_prefixes and name.startswith(module_prefixes))
    }
    module, notes = load_module(directory, own, options.target.path.parent)
    plain = BasicOutputModule.of(module)
    if options.with_past:
        loaded = _with_past(options, directory, module)
    else:
        loaded = _without_past(options, directory, module, tensors)
    return replace(loaded, notes=(*notes, *loaded.notes, *_unserved_outputs(options, directory, loaded.model, plain)))


def output_kind(options: Options, spec: TensorSpec) -> TensorSpec:
    """Return ``spec`` with the kind that the config implies: a regression head also calls its output logits."""
    config = Directory.open(options.source).config
    regresses = config.get("problem_type") == "regression" or len(config.get("id2label", {}) or {}) == 1
    return replace(spec, kind="regression") if spec.kind == "logits" and regresses else spec


def _without_past(options: Options, directory: Directory, module: Any, tensors: Mapping[str, Array]) -> LoadedModel:
    """Load the model for one forward pass, with every input that it declares or those of ``--input``."""
    notes: list[str] = []
    if options.inputs:
        edges.check_given(module, options.inputs)
        inputs = options.inputs
    else:
        inputs, notes = edges.declared(module, directory)
    if directory.parts is None:
        return _loaded(options, directory, module, inputs, notes)
    from converter.read.huggingface.sentence import sentence

    loaded = _loaded(options, directory, sentence(directory, module, tensors), inputs, notes, _call_with_feeds)
    oracle, further = _sentence_oracle(directory, module, loaded.model)
    return replace(loaded, oracle=oracle, notes=(*loaded.notes, *further))


def _loaded(
    options: Options,
    directory: Directory,
    module: Any,
    inputs: tuple[TensorSpec, ...],
    notes: list[str],
    call: Call | None = None,
) -> LoadedModel:
    for candidate in edges.batches(inputs) if not options.inputs else (inputs,):
        if not samples.can_generate(candidate):
            return LoadedModel(adapt(module, candidate, call=call), None, tuple(notes))
        sampler = samples.sampler(directory, candidate)
        example = next(iter(sampler(0, 1)))
        try:
            return LoadedModel(adapt(module, candidate, call=call, example=example), sampler, tuple(notes))
        except ConversionError:
            if candidate is inputs:
                raise
    raise AssertionError("the inputs as declared are the last candidate")


def _sentence_oracle(directory: Directory, transformer: Any, model: TorchModel) -> tuple[Oracle, list[str]]:
    """Return an oracle of another hand than ``model``, whose pooling is this project's, and a note if there is none."""
    from converter.read import oracles
    from converter.read.huggingface.sentence import by_library
    from converter.read.torch.positional import Positional

    theirs = by_library(directory, transformer)
    if theirs is None:
        oracle = oracles.of_module(model)
        missing = (
            "sentence_embedding was not checked against sentence-transformers, which is not installed: pip install"
            " 'bf16kit[sentence]'"
        )
        return replace(oracle, how=f"{oracle.how}; {missing}"), [missing]
    names = [spec.name for spec in model.inputs]
    oracle = oracles.of_module(replace(model, module=Positional(theirs, names, _call_with_feeds).eval()))
    how = f"the modules of sentence-transformers {version('sentence-transformers')}, fp32, on the CPU"
    return replace(oracle, how=how), []


def _call_with_feeds(module: Any, feeds: dict[str, Any]) -> Any:
    return module(feeds)


def _with_past(options: Options, directory: Directory, module: Any) -> LoadedModel:
    from converter.read.huggingface.caches import Cache

    if options.inputs:
        raise UsageError("--with-past: the model's own cache says what its inputs are; leave --input out")
    if directory.parts is not None:
        raise UsageError("--with-past: a sentence-transformers directory has no cache; leave the option out")
    cache = Cache.of(module)
    inputs = cache.inputs()
    sampler = cache.sampler(directory, inputs)
    model = adapt(module, inputs, call=cache.call, example=next(iter(sampler(0, 1))))
    return LoadedModel(model, sampler, ())


def _unserved_outputs(options: Options, directory: Directory, model: TorchModel, plain: BasicOutputModule) -> list[str]:
    """Return a note on outputs of ``plain`` that ``model`` does not serve.

    The cache of a sentence model is not mentioned, because it has no use.
    """
    from converter.read.huggingface.caches import is_causal
    from converter.read.huggingface.unserved import CACHE

    expected = {CACHE} if options.with_past or directory.parts is not None else set()
    missing = [name for name in plain.left_out(model) if name not in expected]
    remedy = "--with-past serves the cache" if CACHE in missing and is_causal(plain.module) else ""
    return not_served(model.outputs, missing, remedy)
