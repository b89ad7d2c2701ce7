import os
from pathlib import Path

import pytest
from containers import in_container

from bf16kit.messages.errors import ConfigError
from bf16kit.runtime import available_cpus, canonical
from bf16kit.runtime.torchruntimes import cpu_has_bf16


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("flags\t\t: fpu sse2 avx2 avx512_bf16 avx512_fp16", True),
        ("flags\t\t: fpu amx_bf16 amx_tile", True),
        ("Features\t: fp asimd bf16 i8mm", True),
        ("flags\t\t: fpu sse2 avx2 f16c", False),
        ("model name\t: a CPU with avx512_bf16 in its name only", False),
        ("", False),
    ],
)
def test_bf16_instructions_are_read_from_the_kernels_flags(tmp_path: Path, line: str, expected: bool) -> None:
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text(f"processor\t: 0\n{line}\nbogomips\t: 1\n")
    assert cpu_has_bf16(cpuinfo) is expected
    assert cpu_has_bf16(tmp_path / "missing") is False


@pytest.mark.parametrize(("quota", "expected"), [(1.0, 1), (0.1, 1), (None, None), (1e9, None)])
def test_a_containers_cpu_quota_bounds_the_threads(
    quota: float | None, expected: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    in_container(monkeypatch, tmp_path, cpus=quota)
    assert available_cpus() == (expected or len(os.sched_getaffinity(0)))


@pytest.mark.parametrize(
    ("text", "device"), [("cpu", "cpu"), ("cuda", "cuda:0"), ("cuda:0", "cuda:0"), ("cuda:3", "cuda:3")]
)
def test_each_device_has_one_canonical_name(text: str, device: str) -> None:
    assert canonical(text) == device


@pytest.mark.parametrize("text", ["gpu", "cuda:", "cuda:x", "cuda:-1", "CPU", "", "cuda:0 "])
def test_an_unknown_device_is_rejected_and_the_valid_names_are_listed(text: str) -> None:
    with pytest.raises(ConfigError, match="cpu and cuda:N"):
        canonical(text)
