"""Which path of the CPU kernel runs, and the stated reason if none runs."""

import _ctypes
import re
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import onnxruntime
import products
import pytest
from onnx import ModelProto, helper

import graphs
from bf16kit.messages.errors import ConfigError
from bf16kit.numerics.tensors import TensorSpec
from bf16kit.runtime.ort import kernel
from bf16kit.runtime.ort.kernel import NOT_NEEDED, PATHS, VARIABLE, Kernel, usable_kernel
from bf16kit.runtime.ort.onnx import OnnxRuntime
from bf16kit.runtime.ort.onnxgraph import kernel_for

built = pytest.mark.skipif(not kernel.LIBRARY.exists(), reason="the kernel was not built: no C++17 compiler")
MODEL = products.product(graphs.values(64, 40))
SPECS = (TensorSpec("x", "float32", ("rows", 64)),), (TensorSpec("y", "float32", ("rows", 40)),)


def runtime(model: ModelProto = MODEL, **options: Any) -> OnnxRuntime:
    return OnnxRuntime(model.SerializeToString(), *SPECS, threads=1, **options)


def in_a_branch(model: ModelProto) -> ModelProto:
    """Return a graph with the same product in both branches of an If, and none in the main graph."""
    branch = helper.make_graph(list(model.graph.node), "branch", [], list(model.graph.output))
    node = helper.make_node("If", ["flag"], ["y"], then_branch=branch, else_branch=branch)
    return graphs.model([node], [graphs.edge("x"), graphs.edge("flag", [], 9)], list(model.graph.output))


@built
def test_the_fastest_path_that_this_processor_can_run_is_chosen() -> None:
    flags = set(Path("/proc/cpuinfo").read_text().split())
    needs: dict[str, set[str]] = {"avx512f": {"avx512f"}, "avx2": {"avx2", "fma"}, "neon": {"asimd"}, "portable": set()}
    expected = next(path for path, needed in needs.items() if needed <= flags)
    rounds = [path for flag, path in (("avx512_bf16", "avx512_bf16"), ("bf16", "neon_bf16")) if flag in flags]
    if "GenuineIntel" in flags:  # dot products of bf16 are slower there than fp32's instructions
        rounds = []
    assert usable_kernel() == Kernel(expected)
    found = usable_kernel(rounds=True)
    if {"amx_tile", "amx_bf16"} <= flags and not found.note:
        assert found == Kernel("amx")
    else:
        assert found == Kernel((rounds or [expected])[0])


@built
@pytest.mark.parametrize("path", PATHS)
def test_the_path_that_the_variable_names_runs(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, path)
    try:
        found = usable_kernel(rounds=True)
    except ConfigError as error:
        pytest.skip(str(error))  # the next test covers this error
    assert found == Kernel(path)
    info = runtime().info
    # no node of this graph uses instructions for bf16
    runs = {"amx": "avx512f", "avx512_bf16": "avx512f", "neon_bf16": "neon"}.get(path, path)
    assert (info.kernel, info.accumulation, info.note, info.advice) == (runs, "fp32", "", "")


@built
def test_a_named_path_that_this_processor_cannot_run_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """The library returns null for it, as for an unknown name. The test uses a name that only Python knows."""
    monkeypatch.setattr(kernel, "PATHS", (*PATHS, "avx10"))
    monkeypatch.setenv(VARIABLE, "avx10")
    with pytest.raises(ConfigError, match=r"is 'avx10', which this processor cannot run; name another .* or unset it"):
        usable_kernel()


@pytest.mark.parametrize("is_built", [True, False])
def test_an_unknown_path_is_an_error_that_lists_the_valid_ones(is_built: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not is_built:
        monkeypatch.setattr(kernel, "LIBRARY", Path("/nowhere/_bf16kernel.so"))
    monkeypatch.setenv(VARIABLE, "avx10")
    expected = f"{VARIABLE} is 'avx10'; allowed are {', '.join(PATHS)} and off; unset it"
    with pytest.raises(ConfigError, match=expected):
        usable_kernel()


def test_off_disables_the_kernel_and_the_note_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "off")
    loaded = runtime()
    assert (loaded.info.kernel, loaded.info.accumulation, usable_kernel().library) == ("", "fp32", None)
    assert loaded.info.note == f"no CPU kernel, because it is switched off by {VARIABLE}=off"
    assert "twice the memory" in loaded.info.advice
    assert f"unset {VARIABLE}" in loaded.info.advice
    assert loaded.run({"x": graphs.values(3, 64)})["y"].shape == (3, 40)


@pytest.mark.parametrize(
    ("library", "note", "advice"),
    [
        (None, "no C++17 compiler, or it failed (pip install -v shows why)", "install bf16kit again"),
        (b"\x7fELF and no more", "its library cannot be loaded", "install a C++17 compiler"),
        (Path(_ctypes.__file__), "bf16kit_kernel_path", "install bf16kit again"),
    ],
    ids=["not built", "damaged", "another library"],
)
def test_the_advice_for_a_library_that_cannot_be_used_says_what_to_install(
    library: bytes | Path | None, note: str, advice: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    if isinstance(library, bytes):
        (tmp_path / "_bf16kernel.so").write_bytes(library)
    monkeypatch.setattr(kernel, "LIBRARY", library if isinstance(library, Path) else tmp_path / "_bf16kernel.so")
    found = usable_kernel()
    assert (found.path, note in found.note, advice in found.advice) == ("", True, True), found


@pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler")
def test_tiles_that_fail_the_self_check_are_named_and_the_next_path_runs(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """No processor at hand has such tiles: a library of three lines answers in place of ours."""
    answers = {"path": '"avx512f"', "path_bf16": '"avx512_bf16"', "tiles_off": '"they failed the self-check"'}
    source = "".join(f"const char* bf16kit_kernel_{of}(void) {{ return {is_}; }}\n" for of, is_ in answers.items())
    (tmp_path / "fake.c").write_text(source)
    monkeypatch.setattr(kernel, "LIBRARY", tmp_path / "fake.so")
    subprocess.run(["cc", "-shared", "-fPIC", "fake.c", "-o", "fake.so"], cwd=tmp_path, check=True)
    found = kernel.configured_kernel(rounds=True)
    assert (found.path, found.note) == (
        "avx512_bf16",
        "the processor's tiles (AMX) are not used, because they failed the self-check",
    )
    assert f"{VARIABLE}=avx512_bf16 stops this message" in found.advice
    assert kernel.configured_kernel() == Kernel("avx512f")  # no product in fp32 uses tiles
    monkeypatch.setenv(VARIABLE, "avx512_bf16")
    assert kernel.configured_kernel(rounds=True) == Kernel("avx512_bf16")


def test_sources_that_hide_the_installed_package_are_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "setup.py").touch()
    monkeypatch.setattr(kernel, "LIBRARY", tmp_path / "bf16kit" / "runtime" / "_bf16kernel.so")
    found = usable_kernel()
    assert "in the checkout that bf16kit is imported from" in found.note
    assert "start Python elsewhere" in found.advice


@built
def test_an_error_of_onnx_runtime_or_the_library_is_quoted(monkeypatch: pytest.MonkeyPatch) -> None:
    class Refusing:
        def register_custom_ops_library(self, path: str) -> None:
            assert path == str(kernel.LIBRARY)
            raise RuntimeError("ONNX Runtime 2.0.0 is not a release this kernel knows")

    monkeypatch.setattr(onnxruntime, "SessionOptions", Refusing)
    found = usable_kernel()
    assert found.path == ""
    assert "ONNX Runtime 2.0.0 is not a release this kernel knows" in found.note
    assert "install an onnxruntime of 1.24 to 1.31, which are tested, or a later 1.x" in found.advice


def test_a_graph_without_our_nodes_needs_no_kernel_and_reports_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The main case is the reference, which uses ONNX Runtime alone. What is no graph is left for it to reject."""
    path = graphs.save_external(graphs.narrow(graphs.mlp()), tmp_path / "cpu.onnx", {16: "weights.bf16", 1: "rest"})
    others = (graphs.mlp().SerializeToString(), graphs.if_branches().SerializeToString(), b"no graph")
    for model in (path, tmp_path / "missing.onnx", *others):
        assert kernel_for(model) is NOT_NEEDED
    monkeypatch.setenv(VARIABLE, "off")
    info = runtime(graphs.mlp((64, 40)), precision="fp32").info
    assert (info.kernel, info.note, info.advice) == ("", "", "")


@pytest.mark.parametrize("model", [MODEL, in_a_branch(MODEL)], ids=["main graph", "branch"])
def test_a_graph_with_our_nodes_at_any_level_needs_the_kernel(model: ModelProto, tmp_path: Path) -> None:
    path = tmp_path / "cpu.onnx"
    path.write_bytes(model.SerializeToString())
    needed = replace(usable_kernel(), operators=("MatMul",))
    assert kernel_for(path) == kernel_for(path.read_bytes()) == needed != NOT_NEEDED


# --- the releases of ONNX Runtime that are tested (make test-kernel-versions); messages and docs name the same --------

ROOT = Path(__file__).resolve().parents[3]


def _found(pattern: str, path: str) -> str:
    found = re.search(pattern, (ROOT / path).read_text("utf-8"))
    assert found is not None, f"{path} has no {pattern}"
    return found[1]


def test_every_minor_release_from_the_oldest_to_the_pinned_one_is_tested_and_messages_and_docs_name_them() -> None:
    oldest = int(_found(r"kVersion = (\d+);", "kernels/ort/abi.h"))
    pinned = _found(r"onnxruntime==(\S+)", "constraints.txt")
    newest = int(pinned.split(".")[1])
    tested = _found(r"versions=\(([\d. ]+)\)", "kernels/tests/versions.sh").split()
    assert [int(version.split(".")[1]) for version in tested] == list(range(oldest, newest + 1))
    assert tested[-1] == pinned
    required = int(_found(r"onnxruntime>=1\.(\d+)", "pyproject.toml"))
    assert oldest <= required <= newest
    said = rf"an onnxruntime of 1\.{required} to 1\.({newest}), which are tested, or a later 1\.x"
    for path in ("bf16kit/runtime/ort/kernel.py", "docs/operations.md"):
        assert _found(said, path)
    assert _found(rf"every minor version from 1\.{oldest} to 1\.({newest})", "docs/operations.md")
    assert _found(rf"1\.({oldest}) or a later 1\.x", "kernels/ort/register.cpp")
