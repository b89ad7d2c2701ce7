"""Reads a TensorFlow SavedModel or a Keras model as a source.

TensorFlow translates and runs it in a separate process.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from bf16kit.messages.errors import ConversionError, SourceError, UsageError
from bf16kit.messages.wording import quoted
from converter.options import Options
from converter.read.detect import Kind
from converter.read.readers.common import Advance
from converter.source import Checkpoint, Oracle, Source, digest_files

if TYPE_CHECKING:
    import onnx_ir as ir

    from converter.read.tensorflow.bundle import Bundle
    from converter.read.tensorflow.environment import Environment
    from converter.read.tensorflow.process import TensorFlowProcess
    from converter.read.tensorflow.savedmodel import ServedSignature
    from converter.source import Array

_OPSET = 18  # the newest that tf2onnx writes
_DAMAGED = ("DataLossError", "hecksum")  # in TensorFlow's errors for variables whose bytes changed


@dataclass(frozen=True, slots=True)
class _Model:
    """A checked SavedModel, and the source it was made from."""

    source: Path
    format: str
    files: tuple[Path, ...]
    prefix: Path
    chosen: ServedSignature
    stored: Bundle


def read(options: Options, kind: Kind, advance: Advance) -> Source:
    """Return the model as a source. The files are checked first, then TensorFlow is started.

    Raises :class:`UsageError` when TensorFlow is missing, :class:`ConversionError` for a model that cannot be
    translated.
    """
    from converter.read.tensorflow import environment, kerasfile

    if options.model is not None:
        raise UsageError(f"--model: {kind.value} brings its own architecture")
    if kind is Kind.KERAS:
        kerasfile.check(options.source)
        python = environment.require()
        kerasfile.check_version(python)
        child = _start(options.source, python)
        exported, model_file = child.directory / "exported", child.directory / "model.keras"
        # Keras chooses its loader by the file name, and only this loader is safe.
        model_file.symlink_to(options.source.resolve())
        _ask(options.source, child, "export", model=str(model_file), to=str(exported))
        return _source(options, _checked_model(options, exported, "keras", (options.source,)), child, advance)
    model = _checked_model(options, options.source, "saved-model", ())
    return _source(options, model, _start(options.source, environment.require()), advance)


def _checked_model(options: Options, directory: Path, form: str, files: tuple[Path, ...]) -> _Model:
    from converter.read import precisions
    from converter.read.tensorflow import bundle, savedmodel

    chosen = savedmodel.choose(directory, options.signature)
    prefix = directory / "variables" / "variables"
    stored = bundle.read(prefix)
    precisions.check_range(options.source, stored.tensors)
    return _Model(options.source, form, files or (directory / savedmodel.FILE, *stored.files), prefix, chosen, stored)


def _source(options: Options, model: _Model, child: TensorFlowProcess, advance: Advance) -> Source:
    from converter.read import oracles, precisions
    from converter.read.onnx_file import resolve_edges

    sha256 = digest_files(model.files, advance)
    graph = _translated(model, child)
    tensors, notes = _tensors(model, graph)
    inputs, outputs = resolve_edges(graph, options.inputs)
    unused = sorted(model.chosen.inputs.keys() - {spec.name for spec in inputs})
    notes += [f"input {quoted(name)} has no effect on any output, and is left out" for name in unused]
    names = tuple(model.chosen.outputs)
    return Source(
        Checkpoint(model.format, sha256, tensors),
        graph,
        inputs,
        outputs,
        tools=("onnxscript",),
        foreign_versions=child.versions,
        oracle=Oracle(
            lambda feeds: child.outputs(feeds, names), _oracle_description(model, child), oracles.roundoff(graph)
        ),
        notes=(*model.chosen.notes, *notes, *precisions.notes(tensors, residual=options.residual)),
    )


def _start(source: Path, environment: Environment) -> TensorFlowProcess:
    from converter.read.tensorflow.process import TensorFlowError, TensorFlowProcess

    try:
        return TensorFlowProcess(environment)
    except TensorFlowError as error:
        raise ConversionError(f"{source}: {environment.python} cannot translate it: {error}") from None


def _ask(source: Path, child: TensorFlowProcess, do: str, **arguments: object) -> None:
    from converter.read.tensorflow.process import TensorFlowError

    try:
        child.ask(do, **arguments)
    except TensorFlowError as error:
        message = str(error)
        if any(marker in message for marker in _DAMAGED):
            raise SourceError(f"{source}: truncated or damaged: TensorFlow says {message}") from None
        raise ConversionError(f"{source}: {_FAILED[do]}: {message}") from None


_FAILED = {
    "export": "Keras cannot load and export it; load it with the code that made it, and convert the directory that"
    " model.export(directory) writes",
    "load": "TensorFlow cannot open it",
    "translate": "tf2onnx cannot translate it",
}


def _translated(model: _Model, child: TensorFlowProcess) -> ir.Model:
    from converter.read.onnx_file import read_graph
    from converter.read.tensorflow.batchnorms import restore_batchnorms
    from converter.read.tensorflow.graphnames import make_reproducible

    graph, written = child.directory / "graph.pb", child.directory / "model.onnx"
    graph.write_bytes(model.chosen.graph)
    _ask(
        model.source,
        child,
        "load",
        graph=str(graph),
        variables=str(model.prefix.absolute()) if model.stored.files else None,
        inputs=dict(model.chosen.inputs),
        outputs=dict(model.chosen.outputs),
    )
    graph.unlink()
    _ask(model.source, child, "translate", to=str(written), opset=_OPSET)
    found, _ = read_graph(written)
    written.unlink()
    make_reproducible(found)
    restore_batchnorms(found)
    return found


def _tensors(model: _Model, graph: ir.Model) -> tuple[dict[str, Array], list[str]]:
    """Return the stored variables; for a model without fp32 variables, the graph's constants, which are its weights."""
    from converter.rewrite.explicit import floating_tensors

    stored = model.stored.tensors
    if model.format == "keras":  # created anew whenever Keras loads the file
        stored = {name: array for name, array in stored.items() if not name.endswith("/seed_generator_state")}
    if _any_fp32(stored):
        return stored, []
    constants = floating_tensors(graph)
    if not _any_fp32(constants):
        raise ConversionError(f"{model.source}: holds no fp32 variables or weights, so there is nothing to convert")
    note = "the model has no fp32 variables: its weights are constants of its graph, named as tf2onnx names them"
    return {**constants, **{name: array for name, array in stored.items() if name not in constants}}, [note]


def _any_fp32(tensors: Mapping[str, Array]) -> bool:
    return any(tensor.dtype.name == "float32" for tensor in tensors.values())


def _oracle_description(model: _Model, child: TensorFlowProcess) -> str:
    version = child.versions.get("tensorflow", "")
    return f"TensorFlow {version} running the model's own signature {quoted(model.chosen.signature)} on the CPU"
