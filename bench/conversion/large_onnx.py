"""An ONNX model of many gigabytes with next to no arithmetic: tables that are looked up, and products of a few rows."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from onnx import TensorProto, helper, save_model

WIDTH = 4096
_TABLE_ROWS = 16384  # 268 MB a table
LARGEST = 4 * _TABLE_ROWS * WIDTH  # bytes of its largest tensor
_PRODUCTS = 4  # of [WIDTH, WIDTH], 67 MB each, to every table: as much of one kind as of the other


def write(path: Path, gigabytes: float, table_rows: int = _TABLE_ROWS, width: int = WIDTH) -> int:
    """Write a model of about ``gigabytes`` GB of fp32 weights to ``path`` and one file of external data beside it.

    Returns the bytes of its weights. ids [batch] → the sum of a row of every table, through all products → y [batch,
    width]. Seeded, so always the same; every tensor is another.
    """
    layer = [(table_rows, width), *[(width, width)] * _PRODUCTS]
    layers = max(1, round(gigabytes * 1e9 / sum(4 * rows * columns for rows, columns in layer)))
    shapes = layer * layers
    data = path.with_name(f"{path.stem}.data")
    random = np.random.default_rng(0)
    tensors, nodes, hidden, offset = [], [], "", 0
    with data.open("wb") as file:
        for index, shape in enumerate(shapes):
            name = f"w{index}"
            tensors.append(_external(name, shape, data.name, offset))
            for _ in range(0, shape[0], 256):  # by 256 rows, so that writing needs no memory
                block = random.standard_normal((min(256, shape[0]), width), np.float32)
                block /= np.float32(width**0.5)
                offset += file.write(block.tobytes())
            if index % len(layer) == 0:
                nodes.append(helper.make_node("Gather", [name, "ids"], [f"row{index}"], name=f"gather{index}"))
                if hidden:
                    nodes.append(helper.make_node("Add", [hidden, f"row{index}"], [f"sum{index}"], name=f"add{index}"))
                hidden = f"sum{index}" if hidden else f"row{index}"
            else:
                nodes.append(helper.make_node("MatMul", [hidden, name], [f"product{index}"], name=f"matmul{index}"))
                hidden = f"product{index}"
    nodes.append(helper.make_node("Identity", [hidden], ["y"], name="last"))
    graph = helper.make_graph(
        nodes,
        "large",
        [helper.make_tensor_value_info("ids", TensorProto.INT64, ["batch"])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["batch", width])],
        tensors,
    )
    save_model(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 22)], ir_version=10), path)
    return offset


def _external(name: str, shape: tuple[int, int], location: str, offset: int) -> TensorProto:
    tensor = TensorProto(name=name, data_type=TensorProto.FLOAT, dims=shape, data_location=TensorProto.EXTERNAL)
    for key, value in (("location", location), ("offset", offset), ("length", 4 * shape[0] * shape[1])):
        tensor.external_data.add(key=key, value=str(value))
    return tensor
