"""``bf16kit::AddLayerNorm…`` and ``…RmsNorm…`` in real sessions: results, bit-identical results, rejected inputs."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from kernelpaths import use
from numpy.typing import NDArray
from onnx import ModelProto, helper

import graphs
from bf16kit.messages.errors import RuntimeFailure
from bf16kit.runtime.ort import kernel
from bf16kit.runtime.ort.session import as_runtime_failure, open_session

pytestmark = pytest.mark.skipif(not kernel.LIBRARY.exists(), reason="the kernel was not built: no C++17 compiler")
Array = NDArray[Any]


OPERATORS = [f"AddLayerNorm{bias}{total}" for bias in ("", "_bias") for total in ("", "_sum")]
OPERATORS += ["RmsNorm", "AddRmsNorm", "AddRmsNorm_sum"]


def names_of(op: str) -> list[str]:
    """Return the names of the inputs of ``op``."""
    return ["x", *(["skip"] if "Add" in op else []), "scale", *(["bias"] if "bias" in op else [])]


def model(op: str, **attributes: Any) -> ModelProto:
    names = names_of(op)
    outputs = ["y", *(["sum"] if "sum" in op else [])]
    node = helper.make_node(op, names, outputs, domain="bf16kit", **({"epsilon": 1e-5} | attributes))
    made = graphs.model([node], [graphs.edge(name) for name in names], [graphs.edge(name) for name in outputs])
    made.opset_import.append(helper.make_opsetid("bf16kit", 1))
    return made


def run(made: ModelProto, *inputs: Array, threads: int = 1) -> list[Array]:
    """Return the outputs. Raises :class:`RuntimeFailure` if the load or the run fails."""
    session = open_session(made.SerializeToString(), threads=threads, library=kernel.LIBRARY)
    with as_runtime_failure("running"):
        found: list[Array] = session.run(
            None, dict(zip([value.name for value in made.graph.input], inputs, strict=False))
        )
    return found


def inputs(*shape: int) -> list[Array]:
    generator = np.random.default_rng(0)
    return [generator.standard_normal(size, np.float32) for size in (shape, shape, shape[-1:], shape[-1:])]


def told(op: str, given: list[Array]) -> list[Array]:
    """Return those of :func:`inputs` that ``op`` takes."""
    named = dict(zip(("x", "skip", "scale", "bias"), given, strict=True))
    return [named[name] for name in names_of(op)]


def exact(op: str, x: Array, skip: Array, scale: Array, bias: Array) -> Array:
    s = (x + skip if "Add" in op else x).astype(np.float64)
    off = s if "Rms" in op else s - s.mean(-1, keepdims=True)
    bias = bias if "bias" in op else np.zeros_like(bias)
    return np.asarray(off / np.sqrt((off**2).mean(-1, keepdims=True) + 1e-5) * scale + bias)


@pytest.mark.parametrize("path", kernel.PATHS)
@pytest.mark.parametrize("op", OPERATORS)
@pytest.mark.parametrize("shape", [(3, 384), (2, 5, 33), (7,), (1, 1)], ids=str)
def test_norms_are_within_the_rounding_error_of_fp32(
    op: str, shape: tuple[int, ...], path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    use(path, monkeypatch)
    given = inputs(*shape)
    found = run(model(op), *told(op, given))
    np.testing.assert_allclose(found[0], exact(op, *given), rtol=1e-5, atol=2e-6)
    if "sum" in op:
        assert np.array_equal(found[1], given[0] + given[1])


@pytest.mark.parametrize("op", ["AddLayerNorm_bias", "AddRmsNorm", "RmsNorm"])
def test_threads_paths_and_neighbours_change_no_bit(op: str, monkeypatch: pytest.MonkeyPatch) -> None:
    full, made = inputs(3000, 129), model(op)
    given, row = told(op, full), told(op, [full[0][17:18], full[1][17:18], *full[2:]])
    (alone,) = run(made, *given)
    assert np.array_equal(run(made, *given, threads=3)[0], alone)
    assert np.array_equal(run(made, *row)[0], alone[17:18])
    use("avx2", monkeypatch)
    assert np.array_equal(run(made, *given)[0], alone)


@pytest.mark.parametrize("op", ["AddLayerNorm_bias", "AddRmsNorm", "RmsNorm"])
@pytest.mark.parametrize("shape", [(0, 8), (3, 0)], ids=str)
def test_empty_inputs_give_empty_outputs(shape: tuple[int, ...], op: str) -> None:
    assert run(model(op), *told(op, inputs(*shape)))[0].shape == shape


@pytest.mark.parametrize("op", ["AddLayerNorm", "AddRmsNorm", "RmsNorm"])
def test_values_that_are_not_finite_affect_only_their_own_row(op: str) -> None:
    given, made = inputs(4, 40), model(op)
    clean = run(made, *told(op, given))[0]
    for value in (np.nan, np.inf, -np.inf):
        spoilt = given[0].copy()
        spoilt[1, 3] = value
        found = run(made, *told(op, [spoilt, *given[1:]]))[0]
        # The root mean square of a row with an infinity is infinite: finite values become zero, as in float64.
        assert np.isnan(found[1] if "Layer" in op or np.isnan(value) else found[1, 3]).all()
        assert np.array_equal(found[[0, 2, 3]], clean[[0, 2, 3]])


@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        (((2, 8), (1, 8), (8,), (8,)), "x and skip, of 2 and 2 dimensions, do not have one shape"),
        (((), (), (8,), (8,)), "x has no dimensions; it must have at least one"),
        (((2, 8), (2, 8, 1), (8,), (8,)), "x and skip, of 2 and 3 dimensions, do not have one shape"),
        (((2, 8), (2, 8), (7,), (8,)), "the scale has 1 dimensions and 7 elements; it must be \\[8\\]"),
        (((2, 8), (2, 8), (8,), (1, 8)), "the bias has 2 dimensions and 8 elements"),
    ],
)
def test_shapes_that_do_not_fit_are_rejected(shapes: tuple[tuple[int, ...], ...], message: str) -> None:
    with pytest.raises(RuntimeFailure, match=message):
        run(model("AddLayerNorm_bias"), *(np.zeros(shape, np.float32) for shape in shapes))


@pytest.mark.parametrize("epsilon", [-1.0, float("nan"), float("inf"), 1])
def test_an_invalid_epsilon_is_rejected(epsilon: float) -> None:
    with pytest.raises(RuntimeFailure, match="attribute epsilon is"):
        run(model("AddLayerNorm", epsilon=epsilon), *inputs(2, 8)[:3])


@pytest.mark.parametrize("op", ["AddLayerNorm", "AddRmsNorm", "RmsNorm"])
def test_without_a_bias_a_zero_keeps_its_sign(op: str) -> None:
    x = np.array([[-0.0, 0.0, 1.0, -1.0]], np.float32)
    given = told(op, [x, np.full_like(x, -0.0), np.ones(4, np.float32), np.zeros(4, np.float32)])
    assert np.signbit(run(model(op), *given)[0]).tolist() == [[True, False, False, True]]
