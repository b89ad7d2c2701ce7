"""``bf16kit::Attention_…`` and ``AttentionBf16_…`` in real sessions: forms, masks and empty sequences.

kernels/tests/attention_test.cpp compares random cases on every path, and which results must be bit-identical.
"""

import os
import subprocess
import sys
from itertools import product

import ml_dtypes
import numpy as np
import pytest
from products import Array, attention, run

from bf16kit.runtime.ort import kernel

pytestmark = pytest.mark.skipif(not kernel.LIBRARY.exists(), reason="the kernel was not built: no C++17 compiler")
FORMS = ["".join(form) for form in product("rh", repeat=3)]
# Relative and absolute, against float64 on the same operands. In bf16, p is off by half a unit of 8 bits.
TOLERANCES = {"Attention": (1e-5, 2e-6), "AttentionBf16": (2.0**-9, 2.0**-8)}


def heads(batch: int, count: int, rows: int, seed: int, columns: int = 16) -> Array:
    return np.random.default_rng(seed).standard_normal((batch, count, rows, columns), np.float32) * np.float32(1.5)


def as_form(form: str, *values: Array) -> list[Array]:
    """Convert [batch, heads, rows, columns] to [batch, rows, heads x columns] where the letter of ``form`` is r."""
    moved = (v.transpose(0, 2, 1, 3).reshape(v.shape[0], v.shape[2], v.shape[1] * v.shape[3]) for v in values)
    return [
        np.ascontiguousarray(rows) if letter == "r" else value
        for letter, value, rows in zip(form, values, moved, strict=True)
    ]


def assert_close(found: Array, operator: str, *operands: Array, mask: Array | float = 0.0) -> None:
    """Compare with float64, [batch, rows, heads x columns], on the operands as ``operator`` multiplies them."""
    narrow = np.float32 if operator == "Attention" else ml_dtypes.bfloat16
    q, k, v = (each.astype(narrow).astype(np.float64) for each in operands)
    k, v = (np.repeat(each, q.shape[1] // k.shape[1], axis=1) for each in (k, v))
    scores = q @ k.swapaxes(2, 3) * 0.25 + mask
    p = np.exp(scores - scores.max(-1, keepdims=True))
    y = (p / p.sum(-1, keepdims=True)) @ v
    relative, absolute = TOLERANCES[operator]
    wanted = y.transpose(0, 2, 1, 3).reshape(q.shape[0], q.shape[2], -1)
    np.testing.assert_allclose(found, wanted, rtol=relative, atol=absolute)


@pytest.mark.parametrize("operator", TOLERANCES)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("op", ["", "_grouped"])
def test_attention_is_within_its_rounding_error(form: str, op: str, operator: str) -> None:
    shared = 2 if op else 4
    q, k, v = heads(2, 4, 7, 0), heads(2, shared, 45, 1), heads(2, shared, 45, 2, columns=24)
    assert_close(run(attention(f"{operator}_{form}{op}"), *as_form(form, q, k, v), threads=2), operator, q, k, v)


@pytest.mark.parametrize("operator", TOLERANCES)
@pytest.mark.parametrize(
    "shape", [(2, 4, 7, 45), (1, 1, 7, 45), (2, 1, 1, 45), (1, 4, 7, 1), (7, 45), (45,), (1,)], ids=str
)
def test_a_mask_broadcasts_as_add_does(shape: tuple[int, ...], operator: str) -> None:
    q, k, v = heads(2, 4, 7, 0), heads(2, 4, 45, 1), heads(2, 4, 45, 2)
    lowest = np.float32(-3.38953139e38)  # what exporters write for minus infinity
    mask = np.where(np.random.default_rng(3).random(shape) < 0.3, lowest, np.float32(0.5))
    assert_close(run(attention(f"{operator}_hhh_mask"), q, k, v, mask), operator, q, k, v, mask=mask)


@pytest.mark.parametrize("operator", TOLERANCES)
@pytest.mark.parametrize(("batch", "queries", "keys"), [(0, 3, 5), (2, 0, 5), (2, 3, 0), (0, 0, 0)])
def test_empty_sequences_give_empty_results_and_no_keys_give_zeros(
    batch: int, queries: int, keys: int, operator: str
) -> None:
    q, k, v = (np.ones((batch, 4, rows, 16), np.float32) for rows in (queries, keys, keys))
    found = run(attention(f"{operator}_rrr"), *as_form("rrr", q, k, v))
    assert np.array_equal(found, np.full((batch, queries, 64), 0.0 if keys == 0 else 1.0, np.float32))


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
