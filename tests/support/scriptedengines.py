"""Runtimes that a test scripts, in place of ONNX Runtime: they answer with the number of the files that they serve.

The artifacts are real files, which the server opens and checks as ever; only the session is not made. A load or a run
can be held, or fail, and every runtime that is still open is known.
"""

import shutil
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
from artifacts import write_mlp

from bf16kit.artifact.artifact import Artifact
from bf16kit.messages.errors import RuntimeFailure
from bf16kit.numerics.tensors import TensorSpec
from bf16kit.runtime import Array, RuntimeInfo, loading

#: How the files of an edition load: well; not, for a bit has flipped; not, for the engine fails on them.
Kind = Literal["good", "damaged", "failing"]
WIDTH = 16
HELD, FATAL = 1.0, 2.0  # the first value of a request whose run waits, and of one in whose run the engine dies


class ScriptedRuntime:
    """Answers every row with its edition. It notes as a fault what would crash a real session."""

    def __init__(self, engines: "Engines", edition: int, load: str, profile: str, precision: str) -> None:
        """``load`` names the load: a generation's runtime and its reference have the same."""
        self.edition = edition
        self.info = RuntimeInfo("onnxruntime", "cpu", profile, precision, "fp32", f"edition {edition}", load)
        self.inputs = (TensorSpec("x", "float32", ("batch", WIDTH)),)
        self.outputs = (TensorSpec("y", "float32", ("batch", WIDTH)),)
        self.go = threading.Event()
        self.running = 0
        self._engines = engines
        self._open = True

    def run(
        self, feeds: Mapping[str, Array], outputs: Sequence[str] | None = None, *, seconds: float | None = None
    ) -> dict[str, Array]:
        if not self._open:
            self._engines.faults.append(f"{self.info} runs although it is closed")
        marked = feeds["x"][0, 0]
        if marked == HELD:
            self.running += 1
            assert self.go.wait(60)
            self.running -= 1
        if marked == FATAL:
            raise RuntimeFailure("the engine died")
        return {"y": np.full(feeds["x"].shape, self.edition, np.float32)}

    def close(self) -> None:
        if not self._open or self.running:
            self._engines.faults.append(f"{self.info} is closed {'beneath a run' if self.running else 'twice'}")
        self._open = False
        self._engines.open.remove(self)


class Engines:
    """Loads :class:`ScriptedRuntime` from the files that it has written. Loads wait while ``go`` is not set.

    References do the same with ``references_go``, and fail while ``references_fail`` is set.
    """

    def __init__(self, template: Path) -> None:
        self.open: list[ScriptedRuntime] = []
        self.faults: list[str] = []
        self.loads: list[str] = []  # the models of all loads that have come here
        self.waiting: list[int] = []  # and of those that wait
        self.go, self.references_go = threading.Event(), threading.Event()
        self.go.set()
        self.references_go.set()
        self.references_fail = False
        self._template = template
        self._written: dict[Path, tuple[int, Kind]] = {}
        self._loads: dict[int, tuple[int, str]] = {}  # edition and name, by the id of the artifact that was opened

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Return a context in which the server loads from here."""
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(loading, "load", self._load)
            patched.setattr(loading, "load_reference", self._load_reference)
            yield

    def write(self, path: Path, edition: int, kind: Kind) -> None:
        """Put the files of an edition at ``path``, in place of earlier ones."""
        shutil.rmtree(path, ignore_errors=True)
        shutil.copytree(self._template, path, copy_function=shutil.copy)  # with new times
        self._written[path] = edition, kind
        if kind == "damaged":
            file = path / "weights.bf16"
            file.write_bytes(bytes([file.read_bytes()[0] ^ 1]) + file.read_bytes()[1:])

    def _load(self, artifact: Artifact, profile: str, **_: Any) -> ScriptedRuntime:
        edition, kind = self._written[artifact.path]
        model = artifact.path.parent.name
        self.loads.append(model)
        self._loads[id(artifact)] = edition, f"load {self.loads.count(model)} of {model}"
        self.waiting.append(edition)
        assert self.go.wait(60)
        self.waiting.remove(edition)
        if kind == "failing":
            raise RuntimeFailure("the engine cannot load it")
        return self._opened(ScriptedRuntime(self, *self._loads[id(artifact)], profile, "bf16-weights"))

    def _load_reference(self, artifact: Artifact, **_: Any) -> ScriptedRuntime:
        assert self.references_go.wait(60)
        if self.references_fail:
            raise RuntimeFailure("the engine cannot load the reference")
        return self._opened(ScriptedRuntime(self, *self._loads[id(artifact)], "reference", "fp32"))

    def _opened(self, runtime: ScriptedRuntime) -> ScriptedRuntime:
        self.open.append(runtime)
        return runtime


def write_template(path: Path) -> Path:
    """Write the artifact that :class:`Engines` copies. It has no golden samples: they would fit no scripted answer."""
    artifact = write_mlp(path)
    (path / "manifest.json").write_bytes(artifact.manifest.model_copy(update={"golden": None}).dumps())
    return path
