"""Seeds: the valid sources that mutants are made from, small ones of each kind that the converter reads."""

import io
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Self

import ml_dtypes
import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import ModelProto, TensorProto, helper
from safetensors.numpy import save as save_safetensors

import graphs
from graphs import edge, initializer, values

KINDS = ("onnx", "safetensors", "torch", "flax", "orbax")
_TORCH_ARGUMENTS = ("--model", "architectures:Mlp", "--input", "x:float32:batch,16")


@dataclass(frozen=True)
class Seed:
    """A source: its files by name, the file to convert, and the further arguments of the command line."""

    name: str
    kind: str
    main: str
    files: Mapping[str, bytes]
    arguments: tuple[str, ...] = ()
    links: Mapping[str, str] = field(default_factory=dict)  # name → target of the symbolic link

    def with_file(self, name: str, content: bytes) -> Self:
        """Return this seed with the content of one file replaced."""
        return replace(self, files={**self.files, name: content})

    def write(self, directory: Path) -> Path:
        """Write every file and link into ``directory``, and return the path to convert."""
        for name, content in self.files.items():
            (directory / name).parent.mkdir(parents=True, exist_ok=True)
            (directory / name).write_bytes(content)
        for name, target in self.links.items():
            (directory / name).unlink(missing_ok=True)
            (directory / name).symlink_to(target)
        return directory / self.main


def seeds(kind: str) -> tuple[Seed, ...]:
    """Return the seeds of one of :data:`KINDS`. Those of torch import torch."""
    from fuzzing import jax_edits

    made = {"onnx": _onnx, "safetensors": _safetensors, "torch": _torch}
    return (made | {"flax": jax_edits.flax_seeds, "orbax": jax_edits.orbax_seeds})[kind]()


# --- ONNX -------------------------------------------------------------------------------------------------------------


def _onnx() -> tuple[Seed, ...]:
    builders: tuple[Callable[[], ModelProto], ...] = (
        graphs.mlp,
        graphs.conv_bn,
        graphs.embedding,
        graphs.if_branches,
        graphs.loop,
        graphs.constant_nodes,
        lstm,
        function,
        half,
        old,
        typed_data,
    )
    inline = [Seed(b.__name__, "onnx", "m.onnx", {"m.onnx": b().SerializeToString()}) for b in builders]
    return (*inline, _external("external", 1), _external("external2", 2))


def _external(name: str, files: int) -> Seed:
    model, data = graphs.mlp(), [bytearray() for _ in range(files)]
    for index, tensor in enumerate(model.graph.initializer):
        content = data[index % files]
        raw = tensor.raw_data
        graphs.refer(tensor, f"w{index % files}.bin", len(content), len(raw))
        content.extend(raw)
    stored = {f"w{number}.bin": bytes(content) for number, content in enumerate(data)}
    return Seed(name, "onnx", "m.onnx", {"m.onnx": model.SerializeToString(), **stored})


def lstm(width: int = 8, hidden: int = 4) -> ModelProto:
    """x [seq, batch, width] → LSTM → y [seq, 1, batch, hidden]."""
    return graphs.model(
        [helper.make_node("LSTM", ["x", "w", "r", "b"], ["y", "h"], name="lstm", hidden_size=hidden)],
        [edge("x", ["seq", "batch", width])],
        [edge("y", ["seq", 1, "batch", hidden]), edge("h", [1, "batch", hidden])],
        [
            initializer("w", values(1, 4 * hidden, width)),
            initializer("r", values(1, 4 * hidden, hidden, seed=1)),
            initializer("b", values(1, 8 * hidden, seed=2, scale=0.1)),
        ],
    )


def function(width: int = 16) -> ModelProto:
    """x [batch, width] → the model's own function ``Layer`` (MatMul, Add, Relu) twice → y."""
    opsets = [helper.make_opsetid("", graphs.OPSET)]
    layer = helper.make_function(
        "own",
        "Layer",
        ["x", "w"],
        ["y"],
        [
            helper.make_node("MatMul", ["x", "w"], ["m"]),
            helper.make_node("Constant", [], ["c"], value=initializer("c", values(width, seed=5))),
            helper.make_node("Add", ["m", "c"], ["a"]),
            helper.make_node("Relu", ["a"], ["y"]),
        ],
        opsets,
    )
    graph = helper.make_graph(
        [
            helper.make_node("Layer", ["x", "w0"], ["h"], name="one", domain="own"),
            helper.make_node("Layer", ["h", "w1"], ["y"], name="two", domain="own"),
        ],
        "functions",
        [edge("x", ["batch", width])],
        [edge("y", ["batch", width])],
        [initializer("w0", values(width, width)), initializer("w1", values(width, width, seed=1))],
    )
    opsets.append(helper.make_opsetid("own", 1))
    return helper.make_model(graph, opset_imports=opsets, ir_version=graphs.IR_VERSION, functions=[layer])


def half() -> ModelProto:
    """Return an MLP whose second layer is fp16, between Casts."""
    model = graphs.mlp()
    for tensor in model.graph.initializer:
        if tensor.name in ("w1", "b1"):
            tensor.CopyFrom(
                onnx.numpy_helper.from_array(graphs.weights_of(model)[tensor.name].astype(np.float16), tensor.name)
            )
    nodes = list(model.graph.node)
    nodes[3].input[0] = "narrow"
    nodes[4].output[0] = "wide"
    nodes.insert(3, helper.make_node("Cast", ["h0"], ["narrow"], name="narrow", to=TensorProto.FLOAT16))
    nodes.append(helper.make_node("Cast", ["wide"], ["y"], name="widen", to=TensorProto.FLOAT))
    del model.graph.node[:]
    model.graph.node.extend(nodes)
    return model


def old() -> ModelProto:
    """Return a model of opset 9 and IR version 3, whose weights are also listed as inputs."""
    model = graphs.model(
        [
            helper.make_node("Gemm", ["x", "w", "b"], ["h"], name="gemm", transB=1),
            helper.make_node("Softmax", ["h"], ["y"], name="softmax", axis=1),
        ],
        [edge("x", ["N", 16]), edge("w", [8, 16]), edge("b", [8])],
        [edge("y", ["N", 8])],
        [initializer("w", values(8, 16)), initializer("b", values(8, seed=1))],
    )
    model.ir_version = 3
    model.opset_import[0].version = 9
    return model


def typed_data() -> ModelProto:
    """Return a model of opset 13 with weights in ``float_data``, not raw bytes. A Reshape's shape is an initializer."""
    model = graphs.model(
        [
            helper.make_node("MatMul", ["x", "w"], ["m"], name="matmul"),
            helper.make_node("Reshape", ["m", "shape"], ["y"], name="reshape"),
        ],
        [edge("x", ["batch", 8])],
        [edge("y", ["batch", 2, 4])],
        [
            helper.make_tensor("w", TensorProto.FLOAT, [8, 8], values(8, 8).reshape(-1)),
            helper.make_tensor("shape", TensorProto.INT64, [3], [-1, 2, 4]),
        ],
    )
    model.opset_import[0].version = 13
    return model


# --- weights of architectures.Mlp -------------------------------------------------------------------------------------


def mlp_weights() -> dict[str, NDArray[Any]]:
    """Return the weights of ``architectures.Mlp``, with torch's names and shapes."""
    return {
        "up.weight": values(64, 16, scale=2.0),
        "up.bias": values(64, seed=1, scale=0.1),
        "down.weight": values(10, 64, seed=2),
        "down.bias": values(10, seed=3, scale=0.1),
    }


def _safetensors() -> tuple[Seed, ...]:
    weights = mlp_weights()
    half = {name: array.astype(np.float16 if "up" in name else ml_dtypes.bfloat16) for name, array in weights.items()}
    index = {name: f"{'a' if name.startswith('up') else 'b'}.safetensors" for name in weights}
    shards = {
        shard: save_safetensors({name: weights[name] for name in weights if index[name] == shard})
        for shard in sorted(set(index.values()))
    }
    listing = json.dumps({"metadata": {"total_size": 7208}, "weight_map": index}).encode()
    single = save_safetensors(weights, {"format": "pt"})
    return (
        Seed("single", "safetensors", "m.safetensors", {"m.safetensors": single}, _TORCH_ARGUMENTS),
        Seed("halves", "safetensors", "m.safetensors", {"m.safetensors": save_safetensors(half)}, _TORCH_ARGUMENTS),
        Seed("sharded", "safetensors", "i.json", {"i.json": listing, **shards}, _TORCH_ARGUMENTS),
    )


def _torch() -> tuple[Seed, ...]:
    import torch

    weights = {name: torch.from_numpy(array) for name, array in mlp_weights().items()}
    together = torch.cat([tensor.reshape(-1) for tensor in weights.values()])  # one storage, every tensor at an offset
    shared, offset = {}, 0
    for name, tensor in weights.items():
        shared[name] = together[offset : offset + tensor.numel()].view(tensor.shape)
        offset += tensor.numel()
    lightning = {
        "pytorch-lightning_version": "2.6.6",
        "epoch": 3,
        "state_dict": {f"model.{name}": tensor for name, tensor in weights.items()},
        "callbacks": {"ModelCheckpoint{'monitor': None}": {"best_model_path": "m.ckpt"}},
    }
    states: dict[str, object] = {
        "plain": weights,
        "offsets": shared,
        "fp16": {name: tensor.half() for name, tensor in weights.items()},
        "bf16": {name: tensor.bfloat16() for name, tensor in weights.items()},
        "nested": {"epoch": 3, "state_dict": {f"model.{name}": tensor for name, tensor in weights.items()}},
        "lightning": lightning | {"hyper_parameters": {"hidden": 64, "lr": 0.1}, "hparams_name": "kwargs"},
        "averaged": lightning | {"current_model_state": shared, "averaging_state": {"n_averaged": torch.tensor(3)}},
    }
    return tuple(Seed(name, "torch", "m.pt", {"m.pt": _saved(s)}, _TORCH_ARGUMENTS) for name, s in states.items())


def _saved(state: object) -> bytes:
    import torch

    buffer = io.BytesIO()
    torch.save(state, buffer)
    return buffer.getvalue()
