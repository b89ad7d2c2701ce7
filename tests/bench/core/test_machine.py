"""The kind of machine that results are filed under."""

from __future__ import annotations

import pytest

from bench.core import machine

ZEN4 = {"vendor_id": "AuthenticAMD", "cpu family": "25", "model": "17", "flags": "fma avx2 avx512f avx512_bf16"}
SAPPHIRE = {"vendor_id": "GenuineIntel", "cpu family": "6", "model": "143", "flags": "avx2 avx512_bf16 amx_bf16"}
GRAVITON = {"Features": "fp asimd bf16"}


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        (ZEN4, "amd-19h-11h-avx512bf16-2cpu"),
        (SAPPHIRE, "intel-06h-8fh-amxbf16-2cpu"),
        (GRAVITON, "aarch64-bf16-2cpu"),
        ({}, "aarch64-plain-2cpu"),
    ],
)
def test_the_key_says_vendor_family_model_widest_instructions_and_processors(
    monkeypatch: pytest.MonkeyPatch, fields: dict[str, str], expected: str
) -> None:
    monkeypatch.setattr(machine, "_cpu_field", lambda field: fields.get(field, ""))
    monkeypatch.setattr("platform.machine", lambda: "aarch64")
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 1})
    assert machine.key() == expected
