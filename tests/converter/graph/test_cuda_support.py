"""For which ONNX Runtime's kernels the cuda profile is planned, and the note if it is not the installed one."""

from __future__ import annotations

from pathlib import Path

import pytest
from converting import ONNX_ONLY, Cli

from bf16kit.artifact.artifact import Artifact
from bf16kit.system.versions import version_key
from converter.graph.cuda_support import KernelTable, other_release_note, releases
from converter.process import versions

NEWEST = "1.31.1"


def _install(monkeypatch: pytest.MonkeyPatch, version: str | None) -> None:
    monkeypatch.setattr(versions, "onnxruntime", lambda: version)


@pytest.mark.parametrize(
    ("installed", "chosen"),
    [
        ("1.25.0", "1.25.0"),
        ("1.25.1", "1.25.0"),
        ("1.24.0", "1.24.1"),
        ("1.24.9", "1.24.4"),
        ("1.40.0", NEWEST),
        (None, NEWEST),
    ],
)
def test_the_table_is_that_of_the_installed_version_or_of_the_newest_before_it(
    monkeypatch: pytest.MonkeyPatch, installed: str | None, chosen: str
) -> None:
    _install(monkeypatch, installed)
    assert KernelTable.load().onnxruntime == chosen


def test_every_minor_release_that_bf16kit_installs_with_has_a_table() -> None:
    """The last table is for the newest release for CUDA; CPU builds have reached 1.32.0."""
    known = releases()
    in_cuda_table = [version_key(each)[:2] for each in known if each not in ("1.24.4", "1.31.1")]
    assert in_cuda_table == [(1, n) for n in range(24, 32)]
    assert known[-1] == NEWEST


def test_the_tables_show_in_which_release_a_kernel_appeared() -> None:
    """The releases' registries show this. One release earlier, each would fail at load or run on the CPU."""
    gained = {
        ("ReduceMean", 18): "1.30.0",
        ("Sin", 22): "1.27.0",
        ("Attention", 23): "1.25.0",
        ("Flatten", 21): "1.25.0",
        ("MatMul", 13): "1.24.1",
    }
    for (op, since), release in gained.items():
        having = [each for each in releases() if KernelTable.load(each).has_bf16_kernel("", op, since)]
        assert having == list(releases())[releases().index(release) :], op


def test_a_kernel_without_a_last_version_is_for_its_first_version_only() -> None:
    """ONNX Runtime matches such kernels this way, because it knows nothing of later versions of an operator."""
    before, after = (KernelTable.load(release) for release in ("1.24.4", "1.25.0"))
    assert before.has_bf16_kernel("", "Flatten", 13)
    assert not before.has_bf16_kernel("", "Flatten", 21)
    assert after.has_bf16_kernel("", "Flatten", 21)
    assert [(kernel.first, kernel.last) for kernel in before.kernels["", "Flatten"]][-1] == (13, 0)


def test_a_kernel_takes_a_node_only_if_all_its_dtypes_match() -> None:
    table = KernelTable.load(NEWEST)
    assert table.accepts_dtypes("", "Where", 16, {"B": "bool", "T": "bfloat16"})
    assert not table.accepts_dtypes("", "Where", 16, {"B": "bfloat16", "T": "bfloat16"})
    assert table.accepts_dtypes("", "LayerNormalization", 17, {"T": "bfloat16", "U": "float"})
    assert not table.accepts_dtypes("", "LayerNormalization", 17, {"T": "bfloat16", "U": "bfloat16"})
    assert table.accepts_dtypes("", "Cast", 13, {"T1": "bfloat16", "T2": "float"})
    assert table.accepts_dtypes(
        "", "Gather", 13, {"T": "bfloat16", "tensor(int64)": "int64"}
    )  # int64 is under no constraint of the kernel


def test_an_operator_whose_dtype_is_an_attribute_is_not_planned_in_bf16() -> None:
    table = KernelTable.load(NEWEST)
    assert table.accepts_dtypes("", "ConstantOfShape", 21, {"T2": "bfloat16"})
    assert not table.has_bf16_kernel("", "ConstantOfShape", 21)  # its dtype is an attribute


def test_a_note_states_that_another_version_s_table_is_used(
    cli: Cli, onnx_file: Path, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert other_release_note() is None
    _install(monkeypatch, "1.25.1")
    out = cli("checkpoint", onnx_file, "--out", target, *ONNX_ONLY).published().out
    assert (
        "bf16 kernels of ONNX Runtime 1.25.0, because there is no kernel table for the installed version 1.25.1" in out
    )
    profiles = Artifact.open(target).manifest.profiles
    assert profiles["cuda"].requires == {"onnxruntime": "1.24.1"}
    assert profiles["cpu"].requires == {"onnxruntime": "1.24"}
