"""Models with the names and shapes that tritonclient's published examples use.

``python tests/support/examplemodels.py DIRECTORY`` writes a repository of them; docs/conformance.md describes its use.
"""

import sys
from pathlib import Path

import numpy as np
from artifacts import write_artifact

from bf16kit.artifact.artifact import Artifact
from bf16kit.numerics.tensors import TensorSpec

_IMAGE = (3, 224, 224)
_LABELS = 10


def write_sums(target: Path, dtype: str) -> Artifact:
    """Publish ``OUTPUT0`` = ``INPUT0`` + ``INPUT1`` and ``OUTPUT1`` = ``INPUT0`` − ``INPUT1``, [batch,16].

    With ``dtype`` "string", inputs and outputs are numbers as text.
    """
    nodes = "OUTPUT0 = Add(INPUT0, INPUT1) OUTPUT1 = Sub(INPUT0, INPUT1)"
    if dtype == "string":
        nodes = """
            a = Cast<to = 6>(INPUT0)
            b = Cast<to = 6>(INPUT1)
            sum = Add(a, b)
            difference = Sub(a, b)
            OUTPUT0 = Cast<to = 8>(sum)
            OUTPUT1 = Cast<to = 8>(difference)"""
    return _write(target, nodes, dtype, inputs=("INPUT0", "INPUT1"), outputs=("OUTPUT0", "OUTPUT1"))


def write_identity(target: Path, dtype: str) -> Artifact:
    """Publish ``OUTPUT0`` = ``INPUT0``, [batch,16]."""
    return _write(target, "OUTPUT0 = Identity(INPUT0)", dtype, ("INPUT0",), ("OUTPUT0",))


def write_image(target: Path, *, batched: bool = True) -> Artifact:
    """Publish a classifier of images, ``data_0`` fp32[batch,3,224,224] → ``fc6_1`` fp32[batch,10], with seeded weights.

    Unless ``batched``, input and output have no batch dimension.
    """
    rng = np.random.default_rng(0)
    batch: tuple[str, ...] = ("batch",) if batched else ()
    artifact = write_artifact(
        target,
        lambda weight: (
            f"""place = Constant <value_ints = [-2, -1]> () colours = ReduceMean <keepdims = 0> (data_0, place)
            fc6_1 = MatMul (colours, {weight("w")})"""
        ),
        {"w": rng.standard_normal((3, _LABELS)).astype(np.float32)},
        [TensorSpec("data_0", "float32", (*batch, *_IMAGE))],
        [TensorSpec("fc6_1", "float32", (*batch, _LABELS), "logits")],
        {},
        batch_axis=0 if batched else None,
    )
    (target.parent / "labels.txt").write_text("".join(f"label {i}\n" for i in range(_LABELS)), "utf-8")
    (target.parent / "serving.yaml").write_text("labels: {fc6_1: labels.txt}\n", "utf-8")
    return artifact


def write_examples(repository: Path) -> None:
    """Publish eight models; one of the examples checks their number."""
    for name, dtype in (("simple", "int32"), ("simple_int8", "int8"), ("simple_string", "string")):
        write_sums(repository / name / "1", dtype)
    write_identity(repository / "simple_identity" / "1", "string")
    write_identity(repository / "custom_identity_int32" / "1", "int32")
    for name in ("image", "inception_graphdef"):
        write_image(repository / name / "1")
    write_image(repository / "densenet_onnx" / "1", batched=False)
    (repository / "simple" / "serving.yaml").write_text("max_batch_size: 8\n", "utf-8")


def _write(target: Path, nodes: str, dtype: str, inputs: tuple[str, ...], outputs: tuple[str, ...]) -> Artifact:
    ins, outs = ([TensorSpec(name, dtype, ("batch", 16)) for name in names] for names in (inputs, outputs))
    return write_artifact(target, lambda weight: nodes, {}, ins, outs, {})


if __name__ == "__main__":
    write_examples(Path(sys.argv[1]))
