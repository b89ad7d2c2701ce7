"""What :mod:`bench.kernel.memory` runs in a process of its own: load a model, run it once, say what that took.

``python -m bench.kernel.process ours ARTIFACT`` loads the cpu profile through the kit, ``… fp32 GRAPH`` an ONNX graph
in a bare session, ``… unpacked GRAPH`` one with prepacking off. Prints one JSON object: resident and proportional set
size in bytes, after minus before loading.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bench.kernel import models as kernel_models
from bf16kit.artifact.artifact import Artifact
from bf16kit.runtime.loading import load
from bf16kit.runtime.ort.session import open_session


@dataclass(frozen=True, slots=True)
class Memory:
    """Of one process, in bytes; ``proportional`` counts a page that n processes share as an nth of it."""

    resident: int
    proportional: int


def memory(process: int | str = "self") -> Memory:
    """The memory of ``process`` now, as the kernel adds it up."""
    lines = Path(f"/proc/{process}/smaps_rollup").read_text().splitlines()[1:]
    fields = {line.split(":")[0]: int(line.split()[1]) * 1024 for line in lines}
    return Memory(fields["Rss"], fields["Pss"])


def _loaded(kind: str, model: Path, feeds: Mapping[str, NDArray[Any]]) -> tuple[Callable[[], object], str]:
    """What runs the model once, and the path of the kernel it runs on."""
    if kind == "ours":
        runtime = load(Artifact.open(model, verify=False), "cpu")
        return lambda: runtime.run(feeds), runtime.info.kernel
    session = open_session(model, pack=kind != "unpacked")
    return lambda: session.run(None, feeds), ""


def _main(kind: str, model: Path) -> None:
    # ONNX Runtime's library, numpy's threads and the reading of graphs are there before either side begins.
    open_session(_SMALLEST).run(None, {"x": np.zeros((1, 1), np.float32)})
    feeds = kernel_models.feeds(1)  # and so are numpy's random numbers, 2 MB
    before = memory()
    run, path = _loaded(kind, model, feeds)
    run()
    after = memory()
    taken = Memory(after.resident - before.resident, after.proportional - before.proportional)
    print(json.dumps(asdict(taken) | {"kernel": path}))


def _smallest() -> bytes:
    from onnx import TensorProto, helper

    edges = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [1, 1]) for name in ("x", "y")]
    graph = helper.make_graph([helper.make_node("Relu", ["x"], ["y"])], "smallest", edges[:1], edges[1:])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    return bytes(model.SerializeToString())


if __name__ == "__main__":
    _SMALLEST = _smallest()
    _main(sys.argv[1], Path(sys.argv[2]))
