"""``bf16kit::Attention_…`` and ``AttentionBf16_…`` in real sessions: their results, and which must be bit-identical.

kernels/tests checks random cases on every path, above all of keys that a mask hides; here they run in ONNX Runtime.
"""

from __future__ import annotations

import os
import subprocess
import sys
from itertools import product

import ml_dtypes
import numpy as np
import pytest
from kernelpaths import exact_paths, use
from products import Array, attention, run

from bf16kit.runtime.ort import kernel

pytestmark = pytest.mark.skipif(not kernel.LIBRARY.exists(), reason="the kernel was not built: no C++17 compiler")
FORMS = ["".join(form) for form in product("rh", repeat=3)]
LOWEST = np.float32(-3.38953139e38)  # what exporters write for minus infinity


OPERATORS = ["Attention", "AttentionBf16"]
# Relative and absolute, against float64 on the same operands. In bf16, p is off by half a unit of 8 bits.
TOLERANCES = {"Attention": (1e-5, 2e-6), "AttentionBf16": (2.0**-9, 2.0**-8)}


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
    use(path, monkeypatch, rounds=operator == "AttentionBf16")
    shared = 2 if op else 4
    q, k, v = heads(2, 4, 7, 0), heads(2, shared, 45, 1), heads(2, shared, 45, 2, columns=24)
    found = run(attention(f"{operator}_{form}{op}"), *as_form(form, q, k, v))
    assert_close(found, exact(*in_bf16(operator, q, k, v)), operator)


@pytest.mark.parametrize("operator", OPERATORS)
@pytest.mark.parametrize(
    "shape", [(2, 4, 7, 45), (1, 1, 7, 45), (2, 1, 1, 45), (1, 4, 7, 1), (7, 45), (45,), (1,)], ids=str
)
def test_a_mask_broadcasts_as_add_does(shape: tuple[int, ...], operator: str) -> None:
    q, k, v = heads(2, 4, 7, 0), heads(2, 4, 45, 1), heads(2, 4, 45, 2)
    mask = np.where(np.random.default_rng(3).random(shape) < 0.3, LOWEST, np.float32(0.5))
    found = run(attention(f"{operator}_hhh_mask"), q, k, v, mask)
    assert_close(found, exact(*in_bf16(operator, q, k, v), mask), operator)


@pytest.mark.parametrize("operator", OPERATORS)
def test_rows_with_all_keys_masked_are_the_mean_or_nan_as_in_softmax(operator: str) -> None:
    q, k, v = heads(1, 4, 3, 0), heads(1, 4, 45, 1), heads(1, 4, 45, 2)
    mask = np.zeros((1, 1, 3, 45), np.float32)
    mask[0, 0, 1] = LOWEST
    mean = run(attention(f"{operator}_hhh_mask"), q, k, v, mask)
    np.testing.assert_allclose(mean[0, 1], in_bf16(operator, q, k, v)[2].mean(2).reshape(-1), atol=1e-6)
    mask[0, 0, 1] = -np.inf
    nan = run(attention(f"{operator}_hhh_mask"), q, k, v, mask)
    assert np.isnan(nan[0, 1]).all()
    assert np.array_equal(nan[0, [0, 2]], mean[0, [0, 2]])


@pytest.mark.parametrize("operator", OPERATORS)
def test_nan_and_infinity_in_a_query_stay_in_its_row_and_head(operator: str) -> None:
    q, k, v = heads(1, 4, 3, 0), heads(1, 4, 45, 1), heads(1, 4, 45, 2)
    made = attention(f"{operator}_hhh")
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
    found = run(attention(f"{operator}_rrr"), *as_form("rrr", q, k, v))
    assert np.array_equal(found, np.full((batch, queries, 64), 0.0 if keys == 0 else 1.0, np.float32))


# --- which results are bit-identical ----------------------------------------------------------------------------------


def test_threads_paths_and_neighbours_change_no_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    """The operator, and not the processor, decides the arithmetic."""
    q, k, v = heads(3, 4, 90, 0), heads(3, 4, 170, 1), heads(3, 4, 170, 2)
    answers = {operator: run(attention(f"{operator}_hhh"), q, k, v) for operator in OPERATORS}
    assert np.abs(answers["AttentionBf16"] - answers["Attention"]).max() > 1e-3
    for operator, alone in answers.items():
        made = attention(f"{operator}_hhh")
        for threads in (2, 3):
            assert np.array_equal(run(made, q, k, v, threads=threads), alone)
        assert np.array_equal(run(made, q[1:2], k[1:2], v[1:2]), alone[1:2])
        assert np.array_equal(run(made, q[:, :, 13:15], k, v), alone[:, 13:15])
        single = run(made, q[:, :, 13:14], k, v)  # a single query has an order of sums of its own
        np.testing.assert_allclose(single, alone[:, 13:14], atol=2e-6 if operator == "Attention" else 1e-2)
        assert np.array_equal(run(made, q[1:2, :, 13:14], k[1:2], v[1:2], threads=2), single[1:2])
        rounds = operator == "AttentionBf16"
        for path in exact_paths(monkeypatch, rounds=rounds):
            use(path, monkeypatch, rounds=rounds)
            assert np.array_equal(run(made, q, k, v), alone)
            assert np.array_equal(run(made, q[:, :, 13:14], k, v), single)
        monkeypatch.delenv(kernel.VARIABLE)


@pytest.mark.parametrize("operator", OPERATORS)
@pytest.mark.parametrize("hidden", [LOWEST, np.float32(-np.inf)], ids=["lowest", "infinity"])
def test_masked_padding_changes_no_bit(hidden: np.float32, operator: str) -> None:
    q, k, v = heads(1, 4, 9, 0), heads(1, 4, 170, 1), heads(1, 4, 170, 2)
    made = attention(f"{operator}_hhh_mask")
    short = run(made, q, k[:, :, :100], v[:, :, :100], np.zeros((1, 1, 1, 100), np.float32))
    mask = np.where(np.arange(170) < 100, np.float32(0), hidden).reshape(1, 1, 1, 170)
    assert np.array_equal(run(made, q, k, v, mask), short)


# A process of its own: in one with a history, the C library may keep for itself what the kernel frees.
_ATTEND = """
from pathlib import Path
import numpy as np
from products import attention, run

def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096

def attend(keys):
    operands = (np.ones((1, 1, rows, 128), np.float32) for rows in (16, keys, keys))
    run(attention("Attention_hhh", heads=1, kv_heads=1), *operands)

attend(32_768)  # its keys and values are copied into 33 MB
large = resident()
attend(64)
print(large - resident())
"""


def test_the_memory_for_many_keys_is_given_back_by_the_next_small_attention() -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    # Under AddressSanitizer, freed memory is returned only without its quarantine.
    environment["ASAN_OPTIONS"] = "detect_leaks=0:quarantine_size_mb=0:thread_local_quarantine_size_kb=0"
    done = subprocess.run([sys.executable, "-c", _ATTEND], env=environment, capture_output=True, text=True, check=True)
    assert int(done.stdout) > 30e6
