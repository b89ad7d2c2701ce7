"""Reads a TensorFlow SavedModel or a Keras model as a source.

TensorFlow opens, translates and runs it in a process of its own (:mod:`.worker`); tf2onnx makes the graph.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import weakref
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import onnx_ir as ir

from bf16kit.converter.options import Options
from bf16kit.converter.read.detect import Kind
from bf16kit.converter.read.sources import Advance, check_trusted, precision_notes, untrusted
from bf16kit.converter.source import Array, Checkpoint, Feeds, Oracle, Source, digest_files
from bf16kit.messages.errors import ConversionError, RuntimeFailure, SourceError, UsageError
from bf16kit.messages.wording import brief, quoted
from bf16kit.numerics.tensors import BY_NAME
from bf16kit.runtime.memory.scratch import on_disk

_OPSET = 18  # the newest that tf2onnx writes
_CALLS = re.compile(r"^((Stateful)?PartitionedCall(_\d+)?/)+")  # prefixes of functions that were inlined
VARIABLE = "BF16KIT_TENSORFLOW_PYTHON"
PREPARE = (
    "python3 -m venv tensorflow-env",
    "tensorflow-env/bin/pip install tensorflow-cpu==2.21.0 tf2onnx==1.17.0",
    f"export {VARIABLE}=$PWD/tensorflow-env/bin/python",
)
_ERRORS = {"usage": UsageError, "source": SourceError, "conversion": ConversionError}
_FIXED = {
    "PYTHONNOUSERSITE": "1",
    "PYTHONDONTWRITEBYTECODE": "1",
    "PYTHONHASHSEED": "0",  # tf2onnx's names depend on the order of sets
    "TF_CPP_MIN_LOG_LEVEL": "2",
    "CUDA_VISIBLE_DEVICES": "-1",  # the reference outputs are those of a CPU
    "KERAS_BACKEND": "tensorflow",
}
_TENSORFLOWS = ("tensorflow", "tensorflow-cpu", "tensorflow-intel", "tensorflow-aarch64", "tf-nightly")
_VERSIONS_SCRIPT = """
import importlib.metadata, json
print(json.dumps({str(found.metadata["Name"]): found.version for found in importlib.metadata.distributions()}))
"""


def read(options: Options, kind: Kind, advance: Advance) -> Source:
    """Return the model as a source.

    Raises :class:`UsageError` when TensorFlow is missing, :class:`SourceError` for a program that is not trusted and
    for damaged files, :class:`ConversionError` for a model that cannot be translated.
    """
    from bf16kit.converter.read import oracles
    from bf16kit.converter.read.onnx_file import read_graph, resolve_edges

    if kind is Kind.SAVED_MODEL:
        check_trusted(options, kind.value)
    python = require()
    sha256 = digest_files(_files(options.source, kind), advance)
    keras, trusted = kind is Kind.KERAS, options.trust_code
    request = {"keras": keras, "trusted": trusted, "signature": options.signature, "opset": _OPSET}
    child = TensorFlowProcess(python, options.source, request)
    graph, _ = read_graph(child.directory / "model.onnx")
    for node in graph.graph.all_nodes():
        node.name = _CALLS.sub("", node.name or "")  # the converter makes names unique, and names values by their nodes
        for value in node.outputs:
            if value.name and not value.is_graph_output():  # "" is an output that is left out
                value.name = None
    stored = child.variables()
    tensors, notes = _weights(options.source, stored, graph)
    inputs, outputs = resolve_edges(graph, options.inputs)
    unused = sorted(set(child.reply["inputs"]) - {spec.name for spec in inputs})
    notes += [f"input {quoted(name)} has no effect on any output, and is left out" for name in unused]
    notes += [
        f"output {quoted(old)} was renamed to {quoted(new)}, because an input has the same name"
        for old, new in child.reply["renamed"].items()
    ]
    versions = child.reply["versions"]
    how = f"TensorFlow {versions['tensorflow']} running the model's own signature {quoted(child.reply['signature'])}"
    return Source(
        Checkpoint("keras" if keras else "saved-model", sha256, tensors),
        graph,
        inputs,
        outputs,
        tools=("onnxscript",),
        foreign_versions=versions,
        oracle=Oracle(child.outputs, f"{how} on the CPU", oracles.roundoff(graph)),
        notes=(*notes, *precision_notes(options, tensors)),
    )


def _files(source: Path, kind: Kind) -> list[Path]:
    variables = source / "variables"
    index, data = variables.glob("variables.index"), variables.glob("variables.data-*")
    return [source] if kind is Kind.KERAS else [source / "saved_model.pb", *index, *sorted(data)]


def _weights(source: Path, stored: dict[str, Array], graph: ir.Model) -> tuple[dict[str, Array], list[str]]:
    """Return the stored variables; for a model without fp32 variables, the graph's constants, which are its weights."""
    from bf16kit.converter.rewrite.explicit import floating_tensors

    if any(array.dtype.name == "float32" for array in stored.values()):
        return stored, []
    found = stored | floating_tensors(graph)
    if not any(array.dtype.name == "float32" for array in found.values()):
        raise ConversionError(f"{source}: holds no fp32 variables or weights, so there is nothing to convert")
    return found, ["the model has no fp32 variables: its weights are constants of its graph, as tf2onnx names them"]


class Environment(NamedTuple):
    """A Python, the versions of TensorFlow and tf2onnx in it, and what of these it lacks."""

    python: Path
    versions: Mapping[str, str]
    missing: Sequence[str]


def find() -> Environment:
    """Return the Python to use. Does not import TensorFlow.

    Raises :class:`UsageError` when the one that :data:`VARIABLE` names does not exist or does not run.
    """
    python = Path(os.environ.get(VARIABLE) or sys.executable)
    # before Python 3.11, only -I keeps the working directory off the path
    command = [str(python), "-I", "-c", _VERSIONS_SCRIPT]
    said = ""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, stdin=subprocess.DEVNULL)
        said = done.stderr.strip() or done.stdout.strip()
        listed = dict(json.loads(done.stdout)).items()
    except (OSError, ValueError, TypeError, subprocess.TimeoutExpired) as error:
        raise UsageError(
            f"{python}: cannot be run as a Python: {brief(said or error)}; {VARIABLE} names the python of an"
            " environment with TensorFlow"
        ) from None
    installed = {re.sub("[-_.]+", "-", name).lower(): version for name, version in listed}  # some write tensorflow_cpu
    tensorflow = next(filter(None, map(installed.get, _TENSORFLOWS)), "")
    versions = {"tensorflow": tensorflow, "tf2onnx": installed.get("tf2onnx", "")}
    return Environment(python, versions, [name for name, version in versions.items() if not version])


def require() -> Path:
    """Return the Python to use; :class:`UsageError` with the commands that prepare one if something is missing."""
    found = find()
    if found.missing:
        raise UsageError(
            f"a TensorFlow model is translated by TensorFlow and tf2onnx, and {found.python} lacks"
            f" {' and '.join(found.missing)}; prepare an environment of its own:\n  " + "\n  ".join(PREPARE)
        )
    return found.python


class TensorFlowProcess:
    """The process in which TensorFlow has opened and translated ``source``, and a directory for exchanging files.

    Both end with this object. ``request`` is what :func:`.worker.opened` takes, and ``reply`` what it returns. Raises
    the error that the process reports, or :class:`ConversionError` if it dies.
    """

    def __init__(self, python: Path, source: Path, request: Mapping[str, Any]) -> None:
        self._source = source
        temporary = tempfile.TemporaryDirectory(prefix="bf16kit-tensorflow-", dir=on_disk(), ignore_cleanup_errors=True)
        self.directory = Path(temporary.name)
        worker = str(Path(__file__).with_name("worker.py"))
        # it imports only its own packages: not from this program's path or the user's site
        own = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
        with (self.directory / "output").open("wb") as output:
            self._process: Any = subprocess.Popen(
                [str(python), worker, json.dumps({**request, "source": str(source.resolve())})],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=output,
                cwd=self.directory,
                bufsize=0,
                env={**own, **_FIXED, "KERAS_HOME": temporary.name, "TMPDIR": temporary.name},
            )
        self._end = weakref.finalize(self, _end, self._process, temporary)
        self.reply = self._next_reply()

    def variables(self) -> dict[str, Array]:
        """Return the variables by name, mapped from the files that the process wrote."""
        found = {}
        for index, (name, dtype) in enumerate(self.reply["variables"]):
            if dtype not in BY_NAME:
                raise SourceError(f"{self._source}: variable {quoted(name)} has the unknown TensorFlow dtype {dtype}")
            # copy-on-write: torch and ONNX Runtime take writable arrays, and the file must not change
            mapped = np.load(self.directory / f"{index}.npy", mmap_mode="c", allow_pickle=False)
            found[name] = mapped.view(np.ndarray).view(BY_NAME[dtype].numpy)  # numpy stores bfloat16 as bytes
        return found

    def outputs(self, feeds: Sequence[Feeds]) -> Iterator[Feeds]:
        """Yield the signature's outputs for each of ``feeds``. Raises :class:`RuntimeFailure`."""
        for feed in feeds:
            np.savez(self.directory / "feeds.npz", *feed.values())
            try:
                with contextlib.suppress(BrokenPipeError):  # it has died, which the missing reply tells
                    self._process.stdin.write(json.dumps(list(feed)).encode() + b"\n")
                self._next_reply()
            except ConversionError as error:
                reason = str(error).removeprefix(f"{self._source}: ")  # which artifacts do not name
                raise RuntimeFailure(f"TensorFlow failed on it: {reason}") from None
            with np.load(self.directory / "answers.npz", allow_pickle=False) as answers:
                found = {name: answers[f"arr_{index}"] for index, name in enumerate(self.reply["outputs"])}
            yield found

    def _next_reply(self) -> dict[str, Any]:
        line = self._process.stdout.readline()
        if not line:
            raise ConversionError(f"{self._source}: TensorFlow's process {self._how_it_ended()}")
        reply: dict[str, Any] = json.loads(line)
        if "error" in reply:
            kind, text = reply["error"]
            if kind == "code":
                raise untrusted(self._source, f"is a Keras model with code in it ({text})")
            raise _ERRORS[kind](f"{self._source}: {text}")
        return reply

    def _how_it_ended(self) -> str:
        code = self._process.wait()
        ended = f"ended with exit code {code}" if code >= 0 else f"was killed by {signal.Signals(-code).name}"
        memory = " (out of memory?)" if -code in (signal.SIGKILL, signal.SIGABRT) else ""
        said = (self.directory / "output").read_text(errors="replace").strip().rpartition("\n")[2].strip()
        return f"{ended}{memory}" + (f"; its last output: {brief(said)}" if said else "")


def _end(process: Any, temporary: tempfile.TemporaryDirectory[str]) -> None:
    process.kill()
    process.communicate()
    temporary.cleanup()
