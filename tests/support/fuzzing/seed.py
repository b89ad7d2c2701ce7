"""Seeds: the valid sources that mutants are made from, small ones of each kind that the converter reads."""

import io
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Self

import ml_dtypes
import numpy as np
from numpy.typing import NDArray
from onnx import ModelProto, TensorProto, helper
from safetensors.numpy import save as save_safetensors

import graphs
from graphs import initializer, parsed, values

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
        graphs.mlp, graphs.conv_bn, graphs.embedding, graphs.if_branches, graphs.loop, graphs.constant_nodes, lstm,
        function, half, old, typed_data,
    )  # fmt: skip
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
    return parsed(
        f"""(float[seq, batch, {width}] x) => (float[seq, 1, batch, {hidden}] y, float[1, batch, {hidden}] h) {{
            [lstm] y, h = LSTM <hidden_size = {hidden}> (x, w, r, b)
        }}""",
        w=values(1, 4 * hidden, width),
        r=values(1, 4 * hidden, hidden, seed=1),
        b=values(1, 8 * hidden, seed=2, scale=0.1),
    )


def function(width: int = 16) -> ModelProto:
    """x [batch, width] → the model's own function ``Layer`` (MatMul, Add, Relu) twice → y."""
    model = parsed(
        f"""(float[batch, {width}] x) => (float[batch, {width}] y) {{
            [one] h = own.Layer (x, w0) [two] y = own.Layer (h, w1)
        }}""",
        w0=values(width, width),
        w1=values(width, width, seed=1),
    )
    nodes = graphs.nodes("m = MatMul (x, w) c = Constant <value = float[1] {0}> () a = Add (m, c) y = Relu (a)")
    nodes[1].attribute[0].t.CopyFrom(initializer("c", values(width, seed=5)))
    model.functions.append(helper.make_function("own", "Layer", ["x", "w"], ["y"], nodes, list(model.opset_import)))
    model.opset_import.append(helper.make_opsetid("own", 1))
    return model


def half() -> ModelProto:
    """Return an MLP whose second layer is fp16, between Casts."""
    weights = graphs.weights_of(graphs.mlp())
    return parsed(
        """(float[batch, 16] x) => (float[batch, 16] y) {
            [matmul0] m0 = MatMul (x, w0) [add0] a0 = Add (m0, b0) [relu0] h0 = Relu (a0)
            [narrow] narrow = Cast <to = 10> (h0) [matmul1] m1 = MatMul (narrow, w1) [add1] wide = Add (m1, b1)
            [widen] y = Cast <to = 1> (wide)
        }""",
        **{name: array.astype(np.float16) if "1" in name else array for name, array in weights.items()},
    )


def old() -> ModelProto:
    """Return a model of opset 9 and IR version 3, whose weights are also listed as inputs."""
    model = parsed(
        """(float[N, 16] x, float[8, 16] w, float[8] b) => (float[N, 8] y) {
            [gemm] h = Gemm <transB = 1> (x, w, b) [softmax] y = Softmax <axis = 1> (h)
        }""",
        w=values(8, 16),
        b=values(8, seed=1),
    )
    model.ir_version = 3
    model.opset_import[0].version = 9
    return model


def typed_data() -> ModelProto:
    """Return a model of opset 13 with weights in ``float_data``, not raw bytes. A Reshape's shape is an initializer."""
    model = parsed(
        "(float[batch, 8] x) => (float[batch, 2, 4] y) { [matmul] m = MatMul (x, w) [reshape] y = Reshape (m, shape) }"
    )
    model.graph.initializer.append(helper.make_tensor("w", TensorProto.FLOAT, [8, 8], values(8, 8).reshape(-1)))
    model.graph.initializer.append(helper.make_tensor("shape", TensorProto.INT64, [3], [-1, 2, 4]))
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
