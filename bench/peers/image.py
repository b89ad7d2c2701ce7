"""An image of 600 kB and a model that hardly works: what remains is the server's own handling of a large tensor."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from onnx import TensorProto, helper, numpy_helper

from bench.core import models
from bench.core.results import Result
from bench.core.workspace import Workspace
from bench.peers import environments, rates
from bench.peers.contenders import Case, contenders
from bench.serving import wire

_AT_LEAST = 2.0
_IN_FLIGHT = (1, 8)
_SHAPE = (3, 224, 224)  # float32: 602,112 bytes
_CLASSES = 10


def write_image_model(file: Path) -> Path:
    """The mean of each channel, times a matrix: ``image`` float32 ``[batch,3,224,224]`` → ``scores`` ``[batch,10]``."""
    weight = np.random.default_rng(0).standard_normal((_SHAPE[0], _CLASSES), np.float32)
    nodes = [
        helper.make_node("GlobalAveragePool", ["image"], ["pooled"], "pool"),
        helper.make_node("Flatten", ["pooled"], ["flat"], "flatten", axis=1),
        helper.make_node("MatMul", ["flat", "weight"], ["scores"], "classify"),
    ]
    image = helper.make_tensor_value_info("image", TensorProto.FLOAT, ["batch", *_SHAPE])
    scores = helper.make_tensor_value_info("scores", TensorProto.FLOAT, ["batch", _CLASSES])
    graph = helper.make_graph(nodes, "image", [image], [scores], [numpy_helper.from_array(weight, "weight")])
    return models.save(graph, file)


def measure(workspace: Workspace, *, quick: bool) -> Result:
    """Our requests per second over MLServer's."""
    try:
        versions = environments.versions()
    except RuntimeError as error:
        return Result("peers_image", skipped=str(error))
    workspace.root.mkdir(parents=True, exist_ok=True)
    graph = write_image_model(workspace.root / "image.onnx")
    case = Case("image", graph, workspace.converted("image", graph, "--profile", "cpu"))
    feeds = {"image": np.random.default_rng(0).standard_normal((1, *_SHAPE), np.float32)}
    return rates.compare(
        "peers_image",
        contenders(workspace, case),
        wire.infer_request("image", feeds),
        _IN_FLIGHT,
        goal=_AT_LEAST,
        against="MLServer",
        effort=rates.QUICK if quick else rates.FULL,
        transport="grpcio",  # the other client sends no message larger than a window
        settings={"model": "mean of channels of a 602 kB image, one row", **versions},
    )
