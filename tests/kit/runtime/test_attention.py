"""``bf16kit::Attention_…`` and ``AttentionBf16_…`` in real sessions: their results, which results must be
bit-identical, and which inputs and attributes are rejected."""

from __future__ import annotations

import contextlib
from itertools import product
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from kernelpaths import use
from numpy.typing import NDArray
from onnx import ModelProto, helper

import graphs
from bf16kit.messages.errors import ConfigError, RuntimeFailure
from bf16kit.runtime.ort import kernel
from bf16kit.runtime.ort.session import as_runtime_failure, open_session

pytestmark = pytest.mark.skipif(not kernel.LIBRARY.exists(), reason="the kernel was not built: no C++17 compiler")
Array = NDArray[Any]
FORMS = ["".join(form) for form in product("rh", repeat=3)]
LOWEST = np.float32(-3.38953139e38)  # what exporters write for minus infinity


@pytest.fixture(autouse=True)
def nothing_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(kernel.VARIABLE, raising=False)


OPERATORS = ["Attention", "AttentionBf16"]
# Relative and absolute, against float64 on the same operands. In bf16, p is off by half a unit of 8 bits.
TOLERANCES = {"Attention": (1e-5, 2e-6), "AttentionBf16": (2.0**-9, 2.0**-8)}


def model(op: str, **attributes: Any) -> ModelProto:
    """Return one node ``op`` without a function: 4 heads of 16, scale 0.25, unless ``attributes`` say otherwise."""
    names = ["q", "k", "v", *(["m"] if op.endswith("mask") else [])]
    given = {"heads": 4, "kv_heads": 2 if "grouped" in op else 4, "scale": 0.25} | attributes
    node = helper.make_node(op, names, ["y"], domain="bf16kit", **given)
    made = graphs.model([node], [graphs.edge(name) for name in names], [graphs.edge("y")])
    made.opset_import.append(helper.make_opsetid("bf16kit", 1))
    return made


def run(made: ModelProto, *inputs: Array, threads: int = 1) -> Array:
    """Return the result. Raises :class:`RuntimeFailure` if the load or the run fails."""
    session = open_session(made.SerializeToString(), threads=threads, library=kernel.LIBRARY)
    with as_runtime_failure("running"):
        return np.asarray(session.run(["y"], dict(zip(("q", "k", "v", "m"), inputs, strict=False)))[0])


def heads(batch: int, count: int, rows: int, seed: int, columns: int = 16) -> Array:
    return np.random.default_rng(seed).standard_normal((batch, count, rows, columns), np.float32) * np.float32(1.5)


def assert_close(found: Array, wanted: Array, operator: str) -> None:
    relative, absolute = TOLERANCES[operator]
    np.testing.assert_allclose(found, wanted, rtol=relative, atol=absolute)


def in_bf16(operator: str, q: Array, k: Array, v: Array) -> tuple[Array, Array, Array]:
    """Return the operands as ``operator`` multiplies them."""
    if operator == "Attention":
        return q, k, v
    q, k, v = (operand.astype(ml_dtypes.bfloat16).astype(np.float32) for operand in (q, k, v))
    return q, k, v


def paths_of(operator: str, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the paths that this processor can run and that give the same bits."""
    found = set()
    for path in kernel.PATHS[:-1]:
        monkeypatch.setenv(kernel.VARIABLE, path)
        with contextlib.suppress(ConfigError):
            found.add(kernel.usable_kernel(rounds=operator == "AttentionBf16").path)
    monkeypatch.delenv(kernel.VARIABLE)
    return sorted(found)


def as_form(form: str, *values: Array) -> list[Array]:
    """Convert [batch, heads, rows, columns] to [batch, rows, heads x columns] where the letter of ``form`` is r."""
    moved = (v.transpose(0, 2, 1, 3).reshape(v.shape[0], v.shape[2], v.shape[1] * v.shape[3]) for v in values)
    return [
        np.ascontiguousarray(rows) if letter == "r" else value
        for letter, value, rows in zip(form, values, moved, strict=True)
    ]


def exact(q: Array, k: Array, v: Array, mask: Array | float = 0.0, scale: float = 0.25) -> Array:
    """Return the attention computed in float64, as [batch, rows, heads x columns]."""
    shared = q.shape[1] // k.shape[1]
    wide = [np.repeat(each.astype(np.float64), shared, axis=1) for each in (k, v)]
    scores = q.astype(np.float64) @ wide[0].swapaxes(2, 3) * scale + mask
    p = np.exp(scores - scores.max(-1, keepdims=True))
    y = (p / p.sum(-1, keepdims=True)) @ wide[1]
    return np.asarray(y.transpose(0, 2, 1, 3).reshape(q.shape[0], q.shape[2], -1))


# --- results ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("operator", OPERATORS)
@pytest.mark.parametrize("path", kernel.PATHS)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("op", ["", "_grouped"])
def test_attention_is_within_its_rounding_error(
    form: str, op: str, path: str, operator: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    use(path, monkeypatch)
    shared = 2 if op else 4
    q, k, v = heads(2, 4, 7, 0), heads(2, shared, 45, 1), heads(2, shared, 45, 2, columns=24)
    found = run(model(f"{operator}_{form}{op}"), *as_form(form, q, k, v))
    assert_close(found, exact(*in_bf16(operator, q, k, v)), operator)


def test_the_operator_and_not_the_processor_decides_the_arithmetic(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = heads(2, 4, 7, 0), heads(2, 4, 45, 1), heads(2, 4, 45, 2)
    answers = {operator: run(model(f"{operator}_hhh"), q, k, v) for operator in OPERATORS}
    assert np.abs(answers["AttentionBf16"] - answers["Attention"]).max() > 1e-3
    for operator in OPERATORS:
        for path in paths_of(operator, monkeypatch):
            use(path, monkeypatch)
            assert np.array_equal(run(model(f"{operator}_hhh"), q, k, v), answers[operator])


def test_rounded_weights_add_up_to_one() -> None:
    """If all values are equal, the output equals them: the divisor is the sum of the rounded exponentials."""
    q, k = heads(1, 4, 9, 0), heads(1, 4, 45, 1)
    same = np.full((1, 4, 45, 16), 1.5, np.float32)
    found = run(model("AttentionBf16_hhh"), q, k, same)
    np.testing.assert_allclose(found, 1.5, rtol=1e-6)


@pytest.mark.parametrize("operator", OPERATORS)
@pytest.mark.parametrize(
    "shape", [(2, 4, 7, 45), (1, 1, 7, 45), (2, 1, 1, 45), (1, 4, 7, 1), (7, 45), (45,), (1,)], ids=str
)
def test_a_mask_broadcasts_as_add_does(shape: tuple[int, ...], operator: str) -> None:
    q, k, v = heads(2, 4, 7, 0), heads(2, 4, 45, 1), heads(2, 4, 45, 2)
    mask = np.where(np.random.default_rng(3).random(shape) < 0.3, LOWEST, np.float32(0.5))
    found = run(model(f"{operator}_hhh_mask"), q, k, v, mask)
    assert_close(found, exact(*in_bf16(operator, q, k, v), mask), operator)


@pytest.mark.parametrize("operator", OPERATORS)
def test_rows_with_all_keys_masked_are_the_mean_or_nan_as_in_softmax(operator: str) -> None:
    q, k, v = heads(1, 4, 3, 0), heads(1, 4, 45, 1), heads(1, 4, 45, 2)
    mask = np.zeros((1, 1, 3, 45), np.float32)
    mask[0, 0, 1] = LOWEST
    mean = run(model(f"{operator}_hhh_mask"), q, k, v, mask)
    np.testing.assert_allclose(mean[0, 1], in_bf16(operator, q, k, v)[2].mean(2).reshape(-1), atol=1e-6)
    mask[0, 0, 1] = -np.inf
    nan = run(model(f"{operator}_hhh_mask"), q, k, v, mask)
    assert np.isnan(nan[0, 1]).all()
    assert np.array_equal(nan[0, [0, 2]], mean[0, [0, 2]])


@pytest.mark.parametrize("operator", OPERATORS)
def test_nan_and_infinity_in_a_query_stay_in_its_row_and_head(operator: str) -> None:
    q, k, v = heads(1, 4, 3, 0), heads(1, 4, 45, 1), heads(1, 4, 45, 2)
    made = model(f"{operator}_hhh")
    clean = run(made, q, k, v)
    for value in (np.nan, np.inf, -np.inf):
        spoilt = q.copy()
        spoilt[0, 2, 1, 5] = value
        found = run(made, spoilt, k, v)
        assert np.isnan(found[0, 1, 32:48]).all()
        assert np.array_equal(np.delete(found[0, 1], range(32, 48)), np.delete(clean[0, 1], range(32, 48)))
        assert np.array_equal(found[0, [0, 2]], clean[0, [0, 2]])


@pytest.mark.parametrize("operator", OPERATORS)
@pytest.mark.parametrize(("batch", "queries", "keys"), [(0, 3, 5), (2, 0, 5), (2, 3, 0), (0, 0, 0)])
def test_empty_sequences_give_empty_results_and_no_keys_give_zeros(
    batch: int, queries: int, keys: int, operator: str
) -> None:
    q, k, v = (np.ones((batch, 4, rows, 16), np.float32) for rows in (queries, keys, keys))
    found = run(model(f"{operator}_rrr"), *as_form("rrr", q, k, v))
    assert np.array_equal(found, np.full((batch, queries, 64), 0.0 if keys == 0 else 1.0, np.float32))


# --- which results are bit-identical ----------------------------------------------------------------------------------


@pytest.mark.parametrize("operator", OPERATORS)
def test_threads_paths_and_neighbours_change_no_bit(operator: str, monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = heads(3, 4, 90, 0), heads(3, 4, 170, 1), heads(3, 4, 170, 2)
    made = model(f"{operator}_hhh")
    alone = run(made, q, k, v)
    for threads in (2, 3):
        assert np.array_equal(run(made, q, k, v, threads=threads), alone)
    assert np.array_equal(run(made, q[1:2], k[1:2], v[1:2]), alone[1:2])
    assert np.array_equal(run(made, q[:, :, 13:14], k, v), alone[:, 13:14])
    for path in paths_of(operator, monkeypatch):
        use(path, monkeypatch)
        assert np.array_equal(run(made, q, k, v), alone)


@pytest.mark.parametrize("operator", OPERATORS)
@pytest.mark.parametrize("hidden", [LOWEST, np.float32(-np.inf)], ids=["lowest", "infinity"])
def test_masked_padding_changes_no_bit(hidden: np.float32, operator: str) -> None:
    q, k, v = heads(1, 4, 9, 0), heads(1, 4, 170, 1), heads(1, 4, 170, 2)
    made = model(f"{operator}_hhh_mask")
    short = run(made, q, k[:, :, :100], v[:, :, :100], np.zeros((1, 1, 1, 100), np.float32))
    mask = np.where(np.arange(170) < 100, np.float32(0), hidden).reshape(1, 1, 1, 170)
    assert np.array_equal(run(made, q, k, v, mask), short)


@pytest.mark.parametrize("operator", OPERATORS)
@pytest.mark.parametrize("hidden", [LOWEST, np.float32(-np.inf), np.float32(-10000)], ids=str)
def test_keys_that_are_masked_for_a_row_change_none_of_its_bits(hidden: np.float32, operator: str) -> None:
    """Each row sees a window of keys, shifted against the previous row's; keys outside the window are masked."""
    q, k, v = heads(1, 4, 90, 0), heads(1, 4, 350, 1), heads(1, 4, 350, 2)
    first, last = np.arange(90)[:, None] * 2, np.arange(90)[:, None] * 2 + 70
    seen = (np.arange(350) >= first // 128 * 128) & (np.arange(350) <= last)
    made = model(f"{operator}_hhh_mask")
    whole = run(made, q, k, v, np.where(seen, np.float32(0), hidden).reshape(1, 1, 90, 350))
    for row in range(0, 90, 7):
        begin, end = row * 2 // 128 * 128, row * 2 + 71  # keeps the boundaries of the chains of 128
        alone = run(made, q[:, :, [row]], k[:, :, begin:end], v[:, :, begin:end], np.zeros((1, 1, 1, 1), np.float32))
        assert np.array_equal(whole[:, [row]], alone), row


@pytest.mark.parametrize("operator", OPERATORS)
def test_a_key_whose_score_outweighs_the_mask_contributes(operator: str) -> None:
    q, k, v = np.full((1, 4, 40, 16), 10, np.float32), np.zeros((1, 4, 170, 16), np.float32), heads(1, 4, 170, 2)
    k[:, :, 150] = 10  # a score of 400
    mask = np.where(np.arange(170) < 50, np.float32(0), np.float32(-300)).reshape(1, 1, 1, 170)
    found = run(model(f"{operator}_hhh_mask"), q, k, v, mask)
    assert_close(found, np.tile(v[:, :, 150].reshape(1, 1, 64), (1, 40, 1)), operator)


@pytest.mark.parametrize("operator", OPERATORS)
@pytest.mark.parametrize("where", ["k", "v"])
def test_a_masked_key_that_is_not_finite_makes_every_row_nan(where: str, operator: str) -> None:
    """The definition says so (0 times infinity is NaN), and an implementation that skips masked keys must agree."""
    q, k, v = heads(1, 4, 40, 0), heads(1, 4, 170, 1), heads(1, 4, 170, 2)
    (k if where == "k" else v)[:, :, 150] = np.inf
    mask = np.where(np.arange(170) < 50, np.float32(0), np.float32(-np.inf)).reshape(1, 1, 1, 170)
    assert np.isnan(run(model(f"{operator}_hhh_mask"), q, k, v, mask)).all()


# --- what is rejected -------------------------------------------------------------------------------------------------

_Q, _K = (2, 4, 3, 16), (2, 4, 5, 16)


@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        (((2, 3, 64), _K, _K), "q has 3 dimensions"),
        (((2, 5, 3, 16), _K, _K), "dimension 1 of q is 5, which does not fit to 4 heads"),
        ((_Q, (1, 4, 5, 16), _K), "the batches of q and k: 2 and 1"),
        ((_Q, _K, (3, 4, 5, 16)), "the batches of q and v: 2 and 3"),
        ((_Q, (2, 4, 5, 8), _K), "the columns of q and k, of one head: 16 and 8"),
        ((_Q, _K, (2, 4, 6, 16)), "the rows of k and v: 5 and 6"),
        ((_Q, _K, _K, (2, 4, 3, 4)), "dimension 3 of the mask is 4; it must be 1 or 5"),
        ((_Q, _K, _K, (3, 1, 1, 5)), "dimension 0 of the mask is 3; it must be 1 or 2"),
        ((_Q, _K, _K, (1, 1, 1, 1, 5)), "the mask has 5 dimensions"),
    ],
)
def test_sizes_that_do_not_fit_are_rejected(shapes: tuple[tuple[int, ...], ...], message: str) -> None:
    made = model("Attention_hhh" + ("_mask" if len(shapes) > 3 else ""))
    with pytest.raises(RuntimeFailure, match=message):
        run(made, *(np.zeros(shape, np.float32) for shape in shapes))


def test_columns_that_do_not_divide_into_heads_are_rejected() -> None:
    with pytest.raises(RuntimeFailure, match="dimension 2 of v is 63, which does not fit to 4 heads"):
        run(model("Attention_hhr"), *(np.zeros(shape, np.float32) for shape in (_Q, _K, (2, 5, 63))))


@pytest.mark.parametrize(
    ("attributes", "message"),
    [
        ({"heads": 6, "kv_heads": 4}, "heads = 6 is not a multiple of kv_heads = 4"),
        ({"heads": 0}, "attribute heads is 0"),
        ({"scale": 1}, "attribute scale is missing or of another type"),
        ({"scale": float("inf")}, "attribute scale is not a finite number"),
    ],
)
def test_invalid_attributes_are_rejected(attributes: dict[str, Any], message: str) -> None:
    made = model("Attention_hhh", **attributes)
    with pytest.raises(RuntimeFailure, match=message):
        run(made, *(np.zeros(shape, np.float32) for shape in (_Q, _K, _K)))
