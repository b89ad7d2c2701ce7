"""The program that runs in the Python with TensorFlow, separate from the converter (:mod:`.process` starts it).

It imports nothing of bf16kit: it needs only Python 3.9, numpy, TensorFlow and tf2onnx. Requests arrive on standard
input, one JSON object per line, and each gets one line as its response on what was standard output. TensorFlow's own
output goes to standard error. The program ends when its input does, and is killed when its parent dies.
"""

from __future__ import annotations

import ctypes
import importlib.util
import json
import os
import resource
import shutil
import signal
import sys
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

Request = Mapping[str, Any]
Reply = dict[str, Any]

_PR_SET_PDEATHSIG = 1
_LONGEST = 4000  # characters of an error
_OUTPUT = "bf16kit_output_"
_WEIGHTS = "model.weights.h5"  # in a .keras file
_LONGEST_NAME = 100  # characters of a name in a message
_GROWTH, _SMALL = 50, 1 << 20  # limits of the archive (.kerasfile): a growth factor, and bytes that are always allowed


class OpenedGraph:
    """A graph with its variables in a session, and the tensors of one signature."""

    def __init__(self, graph: Any, session: Any, inputs: Mapping[str, str], outputs: Mapping[str, str]) -> None:
        self.graph, self.session = graph, session
        self.inputs, self.outputs = inputs, outputs


_opened: OpenedGraph | None = None


def start(request: Request) -> Reply:
    """Limit this process' memory, and return its versions."""
    if request.get("memory"):
        resource.setrlimit(resource.RLIMIT_DATA, (request["memory"], request["memory"]))
    import numpy
    import tensorflow as tf
    import tf2onnx

    versions = {"tensorflow": tf.__version__, "tf2onnx": tf2onnx.__version__, "numpy": numpy.__version__}
    return {"versions": versions}


def export(request: Request) -> Reply:
    """Export the Keras model in the file ``model``, called ``*.keras``, as a SavedModel to the directory ``to``."""
    import keras

    _check_weights(Path(request["model"]))
    model = keras.saving.load_model(request["model"], compile=False, safe_mode=True)
    model.export(request["to"], format="tf_saved_model", verbose=False)
    return {"versions": {"keras": keras.__version__}}


def _check_weights(model: Path) -> None:
    """Reject weights that are stored in other files, or that expand too much: Keras does not check its HDF5 file."""
    import h5py

    file = model.with_name("weights-to-check.h5")
    with zipfile.ZipFile(model) as archive, archive.open(_WEIGHTS) as packed, file.open("wb") as unpacked:
        shutil.copyfileobj(packed, unpacked, 1 << 20)
    try:
        with h5py.File(file, "r") as opened:
            waiting, seen = [opened["/"]], set()
            while waiting:
                group = waiting.pop()
                for name in group:
                    what = f"{group.name.rstrip('/')}/{name}"[:_LONGEST_NAME]
                    if not isinstance(group.get(name, getlink=True), h5py.HardLink):
                        raise ValueError(f"{_WEIGHTS} has a link at {what!r}, which Keras does not write")
                    found = group[name]
                    place = h5py.h5o.get_info(found.id).addr
                    if isinstance(found, h5py.Group) and place not in seen:  # a group may contain itself
                        waiting.append(found)
                    elif isinstance(found, h5py.Dataset):
                        _check_dataset(found, what)
                    seen.add(place)
    finally:
        file.unlink()


def _check_dataset(found: Any, what: str) -> None:
    if found.is_virtual or found.external:
        raise ValueError(f"{_WEIGHTS}: the values of {what!r} are in another file, which Keras does not write")
    stored = found.id.get_storage_size()
    if found.nbytes > max(_SMALL, _GROWTH * stored):
        raise ValueError(f"{_WEIGHTS}: {what!r} would grow from {stored} bytes to {found.nbytes}")


def load(request: Request) -> Reply:
    """Open the MetaGraphDef in the file ``graph``, and restore the checkpoint ``variables`` (null: none).

    ``inputs`` and ``outputs`` are its signature: tensors by the names that clients use. No initialiser is run.
    """
    global _opened
    import tensorflow as tf
    from tensorflow.core.protobuf import meta_graph_pb2

    meta = meta_graph_pb2.MetaGraphDef()
    meta.ParseFromString(Path(request["graph"]).read_bytes())
    graph = tf.Graph()
    with graph.as_default():
        session = tf.compat.v1.Session(graph=graph, config=tf.compat.v1.ConfigProto(device_count={"GPU": 0}))
        saver = tf.compat.v1.train.import_meta_graph(meta, clear_devices=True)
        if saver is not None and meta.saver_def.restore_op_name and request["variables"]:
            saver.restore(session, request["variables"])
        outputs = {}
        for index, (name, tensor) in enumerate(request["outputs"].items()):
            found = graph.as_graph_element(tensor, allow_tensor=True, allow_operation=False)
            # a separate tensor, because one may be two outputs, or an input as well
            outputs[name] = tf.identity(found, name=f"{_OUTPUT}{index}").name
        for tensor in request["inputs"].values():
            graph.as_graph_element(tensor, allow_tensor=True, allow_operation=False)
    _opened = OpenedGraph(graph, session, request["inputs"], outputs)
    return {}


def translate(request: Request) -> Reply:
    """Write the opened graph, with variables as constants, to the file ``to`` as ONNX of the opset ``opset``."""
    import onnx
    import tensorflow as tf

    opened = _opened
    assert opened is not None  # noqa: S101 - the converter loads first
    nodes = [tensor.partition(":")[0] for tensor in opened.outputs.values()]
    with opened.graph.as_default():
        frozen = tf.compat.v1.graph_util.convert_variables_to_constants(
            opened.session, opened.graph.as_graph_def(), nodes
        )
    onnx.save(
        _sibling_module("translation").translated(frozen, opened.inputs, opened.outputs, request["opset"]),
        request["to"],
    )
    return {}


def run_signature(request: Request) -> Reply:
    """Run the signature on the arrays in the files ``feeds``, and write its outputs to the files ``answers``."""
    import numpy

    opened = _opened
    assert opened is not None  # noqa: S101 - the converter loads first
    feeds = {opened.inputs[name]: numpy.load(file, allow_pickle=False) for name, file in request["feeds"].items()}
    found = opened.session.run(dict(opened.outputs), feeds)
    for name, file in request["answers"].items():
        with Path(file).open("wb") as stream:
            numpy.save(stream, numpy.asarray(found[name]), allow_pickle=False)
    return {}


def _sibling_module(name: str) -> Any:
    """Import the module ``name`` from this file's directory by path, so that no other file there is importable."""
    spec = importlib.util.spec_from_file_location(f"bf16kit_{name}", Path(__file__).with_name(f"{name}.py"))
    assert spec is not None  # noqa: S101 - the file is there
    assert spec.loader is not None  # noqa: S101
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


_ACTIONS: dict[str, Callable[[Request], Reply]] = {
    "start": start,
    "export": export,
    "load": load,
    "translate": translate,
    "answer": run_signature,
}


def main() -> None:
    """Serve requests until the input ends."""
    if sys.path and Path(sys.path[0]).resolve() == Path(__file__).resolve().parent:
        del sys.path[0]  # before Python 3.11; no file here may shadow a package of the same name
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    for line in sys.stdin:
        request = json.loads(line)
        try:
            reply = _ACTIONS[request["do"]](request)
        except Exception as error:  # noqa: BLE001 - the converter reports every error
            reply = {"error": _error_text(error)}
        replies.write(json.dumps(reply) + "\n")
        replies.flush()


def _error_text(error: Exception) -> str:
    lines: list[str] = [line for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {' '.join(lines)}"[:_LONGEST]


if __name__ == "__main__":
    main()
