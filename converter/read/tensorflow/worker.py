"""The program that runs in the Python with TensorFlow, separate from the converter (:mod:`.reader` starts it).

It imports nothing of bf16kit: it needs only Python 3.9, numpy, TensorFlow and tf2onnx. Its argument is a request in
JSON. It writes ``model.onnx`` and a ``.npy`` file for each variable to its working directory, and replies with one line
of JSON on what was standard output: what these are, or an error. After that, each line on standard input names inputs,
whose arrays are in ``feeds.npz``, and the signature's outputs are written to ``answers.npz``. TensorFlow's own output
goes to standard error. The program ends when its input does, and removes its working directory.
"""

from __future__ import annotations

import importlib
import json
import os
import shutil
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

DEFAULT = "serving_default"
_OWN = "__saved_model_"  # prefix of signatures that TensorFlow adds for its own use
_OBJECTS, _SUFFIX = "_CHECKPOINTABLE_OBJECT_GRAPH", "/.ATTRIBUTES/VARIABLE_VALUE"
_OLDEST_KERAS = (3, 13, 2)  # older `safe_mode`s let code through in several ways (docs/converting.md)
_DAMAGED = ("DataLossError", "NotFoundError", "OutOfRangeError", "BadZipFile")  # exceptions for damaged files
_NO_MEMBER = ("KeyError", "JSONDecodeError", "error")  # for damaged members of a zip archive, or missing ones
_LONGEST = 2000  # characters of an error
_KERAS_FAILED = (
    "Keras cannot load and export it; load it with the code that made it, and convert the directory that"
    " model.export(directory) writes"
)


class Refused(Exception):
    """The model cannot be converted: the kind of error (``usage``, ``source``, ``code``, ``conversion``), and why."""


def opened(request: Mapping[str, Any]) -> tuple[dict[str, Any], Any]:
    """Translate the model of ``request`` and store its variables; return the reply, and a function that runs it."""
    with _failing("TensorFlow cannot be used"):
        import tensorflow as tf
        import tf2onnx

    versions = {"tensorflow": tf.__version__, "tf2onnx": tf2onnx.__version__}
    directory = request["source"]
    if request["keras"]:
        with _failing(_KERAS_FAILED, *_NO_MEMBER):
            directory = _exported(directory, trusted=request["trusted"])
    graph = _graph(directory)
    name, signature = _signature(graph.signature_def, request["signature"])
    inputs, outputs = _tensors(signature.inputs), _tensors(signature.outputs)
    renamed = {old: f"{old}_output" for old in outputs.keys() & inputs.keys()}  # TensorFlow allows it, ONNX does not
    outputs = {renamed.get(old, old): tensor for old, tensor in outputs.items()}
    session = tf.compat.v1.Session(graph=tf.Graph())
    with _failing("TensorFlow cannot open it"), session.graph.as_default():
        tf.compat.v1.saved_model.load(session, list(graph.meta_info_def.tags), directory)
        # a separate tensor for each output, because one may be two outputs, or an input as well
        outputs = {
            new: tf.identity(session.graph.get_tensor_by_name(tensor), name=f"bf16kit_output_{index}").name
            for index, (new, tensor) in enumerate(outputs.items())
        }
        variables = _stored_variables(f"{directory}/variables/variables", keras=request["keras"])
    with _failing("tf2onnx cannot translate it"):
        importlib.import_module("translation").translate(session, inputs, outputs, request["opset"], "model.onnx")

    def run(feeds: Mapping[str, Any]) -> list[Any]:
        found = session.run(outputs, {inputs[fed]: array for fed, array in feeds.items()})
        return [found[output] for output in outputs]

    reply = {"versions": versions, "signature": name, "renamed": renamed, "variables": variables}
    return {**reply, "inputs": list(inputs), "outputs": list(outputs)}, run


@contextmanager
def _failing(what: str, *damage: str) -> Iterator[None]:
    """Report any error as :class:`Refused`: as damage if it is one of the source's, otherwise after ``what``."""
    try:
        yield
    except Refused:
        raise
    except Exception as error:
        kind = type(error).__name__
        text = f"{kind}: {' '.join(str(error).split())}"[:_LONGEST]
        if kind in (*_DAMAGED, *damage) or "hecksum" in text:
            raise Refused("source", f"truncated or damaged: TensorFlow says {text}") from error
        if "safe_mode" in text:  # Keras names it wherever it refuses code
            raise Refused("code", text.partition(". ")[0]) from error
        raise Refused("conversion", f"{what}: {text}") from error


def _exported(source: str, *, trusted: bool) -> str:
    """Export the Keras model in the file ``source`` as a SavedModel; return its directory."""
    import keras

    version = tuple(int(part) for part in keras.__version__.split(".")[:3] if part.isdigit())
    if version < _OLDEST_KERAS and not trusted:
        oldest = ".".join(map(str, _OLDEST_KERAS))
        raise Refused(
            "usage",
            f"TensorFlow's environment has Keras {keras.__version__}, whose safe mode can be evaded; pip install"
            f" 'keras>={oldest}' there, or pass --trust-code if you trust whoever wrote the file",
        )
    Path("model.keras").symlink_to(source)  # Keras chooses its loader by the file name, and only this loader is safe
    model = keras.saving.load_model("model.keras", compile=False, safe_mode=not trusted)
    model.export("exported", format="tf_saved_model", verbose=False)
    return str(Path("exported").resolve())


def _graph(directory: str) -> Any:
    """Return the graph for serving, or the only one."""
    from tensorflow.python.saved_model import loader_impl

    with _failing("TensorFlow cannot open it", "OSError"):
        found = list(loader_impl.parse_saved_model(directory).meta_graphs)
    graphs = [graph for graph in found if list(graph.meta_info_def.tags) == ["serve"]] or found
    if len(graphs) != 1:
        expected = "expected exactly one with the single tag 'serve'; save only the graph to convert"
        raise Refused("conversion", f"holds {len(graphs)} graphs, {expected}")
    return graphs[0]


def _signature(signatures: Any, requested: str | None) -> tuple[str, Any]:
    names = sorted(name for name in signatures if not name.startswith(_OWN))
    if not names:
        raise Refused(
            "conversion",
            "has no signature, so its inputs and outputs are unknown; save it again with tf.saved_model.save(module,"
            " directory, signatures=module.FUNCTION.get_concrete_function(…)), or, from Keras, with"
            " model.export(directory)",
        )
    name = requested or (names[0] if len(names) == 1 else DEFAULT)
    if name not in names:
        raise Refused("usage", f"has no signature {name!r}; choose one with --signature: {', '.join(names)}")
    return name, signatures[name]


def _tensors(entries: Any) -> dict[str, str]:
    """Return the inputs or outputs of a signature by name; :class:`Refused` for those that no artifact can have."""
    from tensorflow.core.framework import types_pb2

    for name, info in sorted(entries.items()):
        dense = info.WhichOneof("encoding") == "name" and not info.tensor_shape.unknown_rank
        if not dense or info.dtype == types_pb2.DT_STRING:
            raise Refused(
                "conversion",
                f"{name!r} is sparse or ragged, holds strings, or has no known rank; export a model that takes and"
                " gives dense tensors of numbers (tf.TensorSpec(shape, dtype) for every input)",
            )
    return {name: info.name for name, info in sorted(entries.items())}


def _stored_variables(prefix: str, *, keras: bool) -> list[tuple[str, str]]:
    """Write the variable of the checkpoint ``prefix`` to ``0.npy``, ``1.npy``, …; return their names and dtypes.

    A name is the one that its layer gave it, if the checkpoint records it, otherwise its key. TensorFlow 2 has a key
    for each way in which a program refers to a variable, with the same bytes under each; these become one.
    """
    import numpy
    import tensorflow as tf
    from tensorflow.core.protobuf import trackable_object_graph_pb2

    if not Path(f"{prefix}.index").exists():
        return []  # opening the graph fails if it needs them
    reader, objects = tf.train.load_checkpoint(prefix), trackable_object_graph_pb2.TrackableObjectGraph()

    def content(key: str) -> tuple[Any, ...]:
        array = reader.get_tensor(key)
        return array.dtype, array.shape, array.tobytes()

    if reader.has_tensor(_OBJECTS):
        objects.ParseFromString(reader.get_tensor(_OBJECTS))
    recorded = {found.checkpoint_key: found.full_name for node in objects.nodes for found in node.attributes}
    groups: dict[str, list[str]] = {}
    for key, dtype in sorted(reader.get_variable_to_dtype_map().items()):
        if dtype != tf.string:
            groups.setdefault(recorded.get(key) or key.removesuffix(_SUFFIX), []).append(key)
    keys: dict[str, str] = {}
    for name, (first, *others) in groups.items():
        shared = all(content(key) == content(first) for key in others)
        for key in [first] if shared else (first, *others):
            own = name if shared else key.removesuffix(_SUFFIX)
            keys[key if own in keys else own] = key
    if keras:  # created anew whenever Keras loads the file
        keys = {name: key for name, key in keys.items() if not name.endswith("/seed_generator_state")}
    stored = []
    for index, name in enumerate(sorted(keys)):  # the order of keys changes between exports of the same model
        array = reader.get_tensor(keys[name])
        numpy.save(f"{index}.npy", array)
        stored.append((name, array.dtype.name))
    return stored


def main() -> None:
    """Open the model that the argument describes; serve requests until the input ends, also if its writer is killed."""
    import numpy

    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)

    def reply(message: Mapping[str, Any]) -> None:
        replies.write(json.dumps(message) + "\n")
        replies.flush()

    try:
        message, run = opened(json.loads(sys.argv[1]))
    except Refused as refused:
        reply({"error": refused.args})
        return
    with suppress(BrokenPipeError):  # the converter was killed meanwhile
        reply(message)
    for line in sys.stdin:
        try:
            with numpy.load("feeds.npz") as feeds:
                found = run({name: feeds[f"arr_{index}"] for index, name in enumerate(json.loads(line))})
            numpy.savez("answers.npz", *found)
            reply({})
        except Exception as error:  # noqa: BLE001 - the converter reports every error
            reply({"error": ("conversion", f"{type(error).__name__}: {' '.join(str(error).split())}"[:_LONGEST])})
    shutil.rmtree(Path.cwd(), ignore_errors=True)


if __name__ == "__main__":
    main()
