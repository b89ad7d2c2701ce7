"""Artifacts written without the converter, for tests of the server: a small graph, bf16 weights, and a real reference.

A change of the converter therefore cannot break the server's tests.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper
from products import product
from safetensors.numpy import save_file

import graphs
from bf16kit.artifact.artifact import Artifact
from bf16kit.artifact.manifest import Manifest, ProfileEntry, Source, SpecEntry, TensorEntry
from bf16kit.artifact.publish import StagingArtifact, staging
from bf16kit.artifact.reading import Digests
from bf16kit.numerics.panels import pack
from bf16kit.numerics.residual import encode_chunks
from bf16kit.numerics.rounding import to_bf16
from bf16kit.numerics.tensors import BY_NAME, DType, TensorSpec
from bf16kit.runtime.loading import load_reference

Array = NDArray[Any]
Weight = Callable[[str], str]  # a weight's name → the fp32 value to use in a node
BUDGET = {"relative_l2": 1.5e-2, "cosine_distance": 5e-4, "top1_agreement": 0.99, "nonfinite": 0.0}


def write_artifact(
    target: Path,
    nodes: Callable[[Weight], str | list[onnx.NodeProto]],
    weights: Mapping[str, NDArray[np.float32]],
    inputs: Sequence[TensorSpec],
    outputs: Sequence[TensorSpec],
    golden: Mapping[str, Array],
    *,
    batch_axis: int | None = 0,
    budget: Mapping[str, float] = BUDGET,
    spoil: float = 0.0,
    kernel: onnx.ModelProto | None = None,
) -> Artifact:
    """Publish a ``cpu`` artifact with a reference and golden samples; ``spoil`` is added to every golden output.

    ``nodes`` gives the nodes, as such or in ONNX's text form. If ``golden`` is empty, the artifact has no golden
    samples. ``kernel`` is a graph for the CPU kernel: ``cpu.onnx`` then has its nodes and functions instead of
    ``nodes``, and every weight is stored as panels.
    """
    with staging(target) as staged:
        tensors = _write_weights(staged, weights, panels=None if kernel is None else 1)
        cpu = [_external(t, TensorProto.BFLOAT16, t.file, t.offset, t.bytes) for t in tensors]
        reference = [_external(t, TensorProto.FLOAT, "residual.rebuilt", 0, 2 * t.bytes) for t in tensors]
        if kernel is None:
            widened = graphs.nodes(" ".join(f"{name}_fp32 = Cast <to = 1> ({name})" for name in weights))
            body = [*widened, *_nodes(nodes(lambda name: f"{name}_fp32"))]
            _save(staged.path / "cpu.onnx", body, cpu, inputs, outputs)
        else:
            for tensor in cpu:
                tensor.dims[:] = [math.prod(tensor.dims)]
            _save(staged.path / "cpu.onnx", kernel.graph.node, cpu, inputs, outputs, kernel.functions)
        _save(staged.path / "reference.onnx", _nodes(nodes(lambda name: name)), reference, inputs, outputs)
        manifest = Manifest(
            model=target.parent.name,
            inputs=[SpecEntry.of(spec) for spec in inputs],
            outputs=[SpecEntry.of(spec) for spec in outputs],
            batch_axis=batch_axis,
            profiles={"cpu": ProfileEntry(format="onnx", graph="cpu.onnx", precision="bf16-weights", verified="host")},
            reference="reference.onnx",
            golden=None,
            tensors=tensors,
            budget=dict(budget),
            source=Source(
                format="test", sha256="", bytes=sum(w.nbytes for w in weights.values()), tensors=len(weights)
            ),
        )
        if not golden:
            return staged.publish(manifest)
        runtime = load_reference(staged.draft(manifest), threads=1)
        answers = {name: np.asarray(y + y.dtype.type(spoil)) for name, y in runtime.run(golden).items()}
        stored = {f"input:{k}": v for k, v in golden.items()} | {f"output:{k}": v for k, v in answers.items()}
        save_file(stored, staged.path / "golden.safetensors")
        return staged.publish(manifest.model_copy(update={"golden": "golden.safetensors"}))


def _nodes(made: str | list[onnx.NodeProto]) -> list[onnx.NodeProto]:
    return graphs.nodes(made) if isinstance(made, str) else made


def write_mlp(
    target: Path, *, width: int = 16, logits: bool = False, spoil: float = 0.0, golden_rows: int = 4
) -> Artifact:
    """Publish ``y = relu(x·a)·b``, fp32[batch,width] → fp32[batch,width]."""
    rng = np.random.default_rng(0)
    weights = {name: rng.standard_normal((width, width)).astype(np.float32) / width**0.5 for name in ("a", "b")}
    return write_artifact(
        target,
        lambda weight: f"h = MatMul (x, {weight('a')}) active = Relu (h) y = MatMul (active, {weight('b')})",
        weights,
        [TensorSpec("x", "float32", ("batch", width))],
        [TensorSpec("y", "float32", ("batch", width), "logits" if logits else "embedding")],
        {"x": rng.standard_normal((golden_rows, width)).astype(np.float32)},
        spoil=spoil,
    )


def write_greedy(target: Path, *, width: int = 16, reference_gib: int = 8) -> Artifact:
    """Publish ``y = x·a``, fp32[batch,width] → fp32[batch,width]. A run of its fp32 reference takes so much memory.

    It has no golden samples, which would be run, too.
    """

    def nodes(weight: Weight) -> str:
        if (name := weight("a")) != "a":
            return f"y = MatMul (x, {name})"
        return f"""product = MatMul (x, a) largest = ReduceMax <keepdims = 0> (product)
            large = Constant <value = int64[1] {{{reference_gib << 28}}}> () filled = Expand (largest, large)
            same = ReduceMin <keepdims = 0> (filled) least = Min (same, largest) zero = Sub (largest, least)
            y = Add (product, zero)"""  # elements of 4 bytes

    return write_artifact(
        target,
        nodes,
        {"a": np.eye(width, dtype=np.float32)},
        [TensorSpec("x", "float32", ("batch", width))],
        [TensorSpec("y", "float32", ("batch", width), "embedding")],
        {},
    )


def write_tables(target: Path, *, rows: int, count: int = 8, width: int = 64) -> Artifact:
    """Publish a model whose ``y`` is the sum of row ``ids`` of ``count`` tables, int64[batch,seq] →
    fp32[batch,seq,width]. It needs almost no arithmetic, however large the tables are."""
    rng = np.random.default_rng(0)
    names = [f"table{i}" for i in range(count)]
    return write_artifact(
        target,
        lambda weight: " ".join(
            [*(f"{name}_row = Gather ({weight(name)}, ids)" for name in names), f"y = Sum ({'_row, '.join(names)}_row)"]
        ),
        {name: rng.standard_normal((rows, width), np.float32) for name in names},
        [TensorSpec("ids", "int64", ("batch", "seq"))],
        [TensorSpec("y", "float32", ("batch", "seq", width), "embedding")],
        {"ids": np.array([[0, rows - 1]])},
    )


def write_product(target: Path, *, width: int = 64, seed: int = 0) -> Artifact:
    """Publish ``y = relu(x·w)``, fp32[batch,width] → fp32[batch,width], which runs on the CPU kernel."""
    rng = np.random.default_rng(seed)
    weight = rng.standard_normal((width, width)).astype(np.float32) / width**0.5
    return write_artifact(
        target,
        lambda weight: f"hidden = MatMul (x, {weight('w')}) y = Relu (hidden)",
        {"w": weight},
        [TensorSpec("x", "float32", ("batch", width))],
        [TensorSpec("y", "float32", ("batch", width))],
        {"x": rng.standard_normal((4, width)).astype(np.float32)},
        kernel=product(weight, activation="relu"),
    )


def write_lookup(target: Path) -> Artifact:
    """Publish a lookup in a table of ten rows, int64[batch,seq] → fp32[batch,seq,4].

    An index beyond the table fails inside the runtime.
    """
    rng = np.random.default_rng(0)
    return write_artifact(
        target,
        lambda weight: f"rows = Gather ({weight('table')}, ids)",
        {"table": rng.standard_normal((10, 4)).astype(np.float32)},
        [TensorSpec("ids", "int64", ("batch", "seq"))],
        [TensorSpec("rows", "float32", ("batch", "seq", 4))],
        {"ids": np.array([[1, 2, 3], [4, 5, 6]])},
    )


def write_kinds(target: Path) -> Artifact:
    """Publish a model that returns its inputs unchanged: one [batch,2] of every dtype but strings."""
    return _write_identities(target, [dtype for dtype in BY_NAME.values() if dtype.name != "string"])


def write_typed(target: Path) -> Artifact:
    """Publish the same for the dtypes that have typed contents, without strings.

    A request to this model can send all its inputs as typed contents.
    """
    return _write_identities(target, [d for d in BY_NAME.values() if d.name not in ("string", "float16", "bfloat16")])


def write_words(target: Path) -> Artifact:
    """Publish the same for strings and fp32. (If an input is bf16, ONNX Runtime accepts no strings from Python.)"""
    return _write_identities(target, [BY_NAME["string"], BY_NAME["float32"]])


def _write_identities(target: Path, dtypes: Sequence[DType]) -> Artifact:
    """Publish ``FP32`` → ``FP32.out`` and so on; each input has the protocol's name of its dtype."""
    specs = [TensorSpec(dtype.oip, dtype.name, ("batch", 2)) for dtype in dtypes]
    return write_artifact(
        target,
        lambda weight: [
            helper.make_node("Mul", ["FP32", weight("one")], ["FP32.out"]),
            *(helper.make_node("Identity", [s.name], [f"{s.name}.out"]) for s in specs if s.name != "FP32"),
        ],
        {"one": np.ones(1, np.float32)},
        specs,
        [TensorSpec(f"{s.name}.out", s.dtype, s.shape) for s in specs],
        {},
    )


def write_attention(target: Path, *, rows: int = 1000, heads: int = 8, width: int = 64) -> Artifact:
    """Publish softmax attention over rows of a table, int64[batch,seq] → fp32[batch,width]. The time of a run grows
    with the square of ``seq``."""

    def nodes(weight: Weight) -> str:
        return f"""split = Constant <value_ints = [0, 0, {heads}, {width // heads}]> ()
            joined = Constant <value_ints = [0, 0, {width}]> () seq = Constant <value_ints = [1]> ()
            x = Gather ({weight("table")}, ids) by_token = Reshape (x, split)
            queries = Transpose <perm = [0, 2, 1, 3]> (by_token) keys = Transpose <perm = [0, 2, 3, 1]> (by_token)
            scores = MatMul (queries, keys) shares = Softmax <axis = -1> (scores) mixed = MatMul (shares, queries)
            again = Transpose <perm = [0, 2, 1, 3]> (mixed) tokens = Reshape (again, joined)
            y = ReduceMean <keepdims = 0> (tokens, seq)"""

    table = np.random.default_rng(0).standard_normal((rows, width), np.float32)
    return write_artifact(
        target,
        nodes,
        {"table": table},
        [TensorSpec("ids", "int64", ("batch", "seq"))],
        [TensorSpec("y", "float32", ("batch", width), "embedding")],
        {"ids": np.array([[0, 1, rows - 1]])},
    )


def _write_weights(
    staged: StagingArtifact, weights: Mapping[str, NDArray[np.float32]], panels: int | None
) -> list[TensorEntry]:
    stored, residual = staged.writer("weights.bf16"), staged.writer("residual.bin")
    entries = []
    for name, fp32 in weights.items():
        bf16 = to_bf16(fp32)
        at = stored.append(bf16 if panels is None else pack(bf16, panels))
        rest = residual.append_chunks(encode_chunks(fp32, bf16))
        at_bytes: dict[str, Any] = {"file": "weights.bf16", "offset": at.offset, "bytes": at.bytes}
        shape = list(fp32.shape)
        entries.append(TensorEntry(name=name, dtype="bfloat16", shape=shape, residual=rest, panels=panels, **at_bytes))
    stored.close()
    residual.close()
    return entries


def _external(tensor: TensorEntry, onnx_type: int, file: str, offset: int, size: int) -> onnx.TensorProto:
    proto = onnx.TensorProto(
        name=tensor.name, data_type=onnx_type, dims=tensor.shape, data_location=TensorProto.EXTERNAL
    )
    for key, value in (("location", file), ("offset", offset), ("length", size)):
        proto.external_data.add(key=key, value=str(value))
    return proto


def _save(
    path: Path,
    nodes: Sequence[onnx.NodeProto],
    initializers: Sequence[onnx.TensorProto],
    inputs: Sequence[TensorSpec],
    outputs: Sequence[TensorSpec],
    functions: Sequence[onnx.FunctionProto] = (),
) -> None:
    graph = helper.make_graph(nodes, path.stem, _edges(inputs), _edges(outputs), initializers)
    opsets = [helper.make_opsetid("", graphs.OPSET)]
    if functions:
        opsets.append(helper.make_opsetid("bf16kit", 1))
    model = helper.make_model(graph, functions=functions, opset_imports=opsets, ir_version=10)
    path.write_bytes(model.SerializeToString())


def _edges(specs: Sequence[TensorSpec]) -> list[onnx.ValueInfoProto]:
    return [helper.make_tensor_value_info(s.name, BY_NAME[s.dtype].onnx, list(s.shape)) for s in specs]


def write_damaged(target: Path, *, scale: float = 1.05, above: float = 0.0) -> Artifact:
    """Publish an MLP whose bf16 graph multiplies its output by ``scale``. Its reference is correct.

    If ``above`` is not 0, only rows whose first value is larger are multiplied. The artifact has no golden samples and
    all its digests are correct, so neither detects the damage.
    """
    artifact = write_mlp(target)
    model = onnx.load(target / "cpu.onnx", load_external_data=False)
    for name, value in {"scale": scale, "one": 1.0, "above": above or -math.inf}.items():
        model.graph.initializer.append(graphs.initializer(name, np.array([value], np.float32)))
    model.graph.initializer.append(graphs.initializer("first", np.array([0])))
    model.graph.node[-1].output[0] = "y_before"
    model.graph.node.extend(
        graphs.nodes(
            """x_first = Gather <axis = 1> (x, first) is_above = Greater (x_first, above)
            factor = Where (is_above, scale, one) y = Mul (y_before, factor)"""
        )
    )
    return _with_graph(artifact, model, golden=None)


def write_endless(target: Path) -> Artifact:
    """Publish an MLP whose graph also has a Loop that never ends; its digests are correct."""
    return _write_looping(target, steps="")


def write_counting(target: Path) -> Artifact:
    """Publish an MLP whose graph also has a Loop of ``x[0, 0]`` rounds, about 100,000 a second."""
    return _write_looping(target, steps="steps")


def _write_looping(target: Path, *, steps: str) -> Artifact:
    """Add to an MLP a Loop that passes ``x`` on for ``steps`` rounds; "" is for ever."""
    artifact = write_mlp(target)
    model = onnx.load(target / "cpu.onnx", load_external_data=False)
    added = graphs.parsed(
        f"""(float x) => (float y) {{
            corner = GatherND (x, first) steps = Cast <to = 7> (corner)
            again = Loop <body = body (int64 round, bool go, float[] in) => (bool go_on, float[] out) {{
                go_on = Identity (go) out = Identity (in)
            }}> ({steps}, yes, x)
            y = Add (y_before, again)
        }}""",
        yes=np.array(True),
        first=np.array([0, 0]),
    ).graph
    model.graph.initializer.extend(added.initializer)
    model.graph.node[-1].output[0] = "y_before"
    kept = [*added.node[:3], *model.graph.node, added.node[3]]
    del model.graph.node[:]
    model.graph.node.extend(kept)
    return _with_graph(artifact, model, golden=None if steps else artifact.manifest.golden)


def _with_graph(artifact: Artifact, model: onnx.ModelProto, *, golden: str | None) -> Artifact:
    """Replace the graph ``cpu.onnx`` of an artifact, and correct its digest."""
    graph = artifact.path / "cpu.onnx"
    graph.write_bytes(model.SerializeToString())
    files = artifact.manifest.files | {"cpu.onnx": Digests().entry(graph)}
    manifest = artifact.manifest.model_copy(update={"files": files, "golden": golden})
    (artifact.path / "manifest.json").write_bytes(manifest.dumps())
    return Artifact.open(artifact.path)
