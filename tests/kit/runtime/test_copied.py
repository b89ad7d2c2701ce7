"""A runtime whose weights are its own: whatever is done to the artifact's files, it answers as it did."""

from __future__ import annotations

import gc
import os
import shutil
from pathlib import Path

import artifacts
import ml_dtypes
import numpy as np
import pytest
import torch
from architectures import Mlp
from converting import MLP, ONNX_ONLY, process
from onnx import TensorProto, helper
from peaks import measured_alone

import graphs
from bf16kit.artifact import Artifact
from bf16kit.errors import ArtifactDamaged
from bf16kit.runtime.copied import copied
from bf16kit.runtime.kernel import DOMAIN, LIBRARY, weights_of
from bf16kit.runtime.loading import load, load_reference
from bf16kit.runtime.ownmemory import LARGE_PAGE, own_memory

KERNEL = pytest.mark.skipif(not LIBRARY.exists(), reason="the kernel was not built: no C++17 compiler")
LARGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")

WIDTH = 512
X = np.linspace(-1, 1, 2 * WIDTH, dtype=np.float32).reshape(2, WIDTH)


@pytest.fixture
def product(tmp_path: Path) -> Artifact:
    """Its weights are read where they are mapped, whenever it runs."""
    path = artifacts.write_product(tmp_path / "product" / "1", width=WIDTH).path
    return Artifact.open(path, copies=True)


@pytest.mark.parametrize("scratch", ["disk", "/dev/shm", "nowhere"])
def test_it_answers_as_before_when_its_files_are_changed_cut_short_and_deleted(
    product: Artifact, tmp_path: Path, scratch: str
) -> None:
    directory = tmp_path if scratch == "disk" else Path(scratch)
    right = load(Artifact.open(product.path), "cpu", threads=1).run({"x": X})["y"]
    runtime = load(product, "cpu", threads=1, scratch=directory)
    with (product.path / "weights.bf16").open("r+b") as file:
        file.write(bytes(1 << 18))
    np.testing.assert_array_equal(runtime.run({"x": X})["y"], right)
    for name in product.manifest.files:
        os.truncate(product.path / name, 0)
    np.testing.assert_array_equal(runtime.run({"x": X})["y"], right)
    shutil.rmtree(product.path)
    np.testing.assert_array_equal(runtime.run({"x": X})["y"], right)


@pytest.fixture(scope="module")
def partly_fp32(tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    """A weight of it stays fp32, in a file that the reference reads as it is."""
    root = tmp_path_factory.mktemp("partly")
    torch.save(Mlp().state_dict(), root / "mlp.pt")
    to = ("--out", root / "mlp" / "1", "--keep-fp32", "bias")
    process("checkpoint", root / "mlp.pt", *MLP, *ONNX_ONLY, *to).published()
    return Artifact.open(root / "mlp" / "1", copies=True)


@pytest.mark.parametrize("scratch", ["disk", "/dev/shm", "nowhere"])
def test_nor_does_the_reference_map_what_is_fp32_already(partly_fp32: Artifact, tmp_path: Path, scratch: str) -> None:
    assert "weights.fp32" in partly_fp32.manifest.files
    reference = load_reference(partly_fp32, threads=1, scratch=tmp_path if scratch == "disk" else Path(scratch))
    assert str(partly_fp32.path) not in Path("/proc/self/maps").read_text()
    golden = partly_fp32.golden()
    answers = reference.run(golden.inputs)
    for name, right in golden.outputs.items():
        np.testing.assert_allclose(answers[name], right, rtol=1e-5, atol=1e-6)


def test_nothing_is_left_in_the_directory_for_temporary_files(product: Artifact, tmp_path: Path) -> None:
    (tmp_path / "scratch").mkdir()
    load(product, "cpu", threads=1, scratch=tmp_path / "scratch")
    assert list((tmp_path / "scratch").iterdir()) == []


def test_a_file_that_is_copied_for_several_tensors_is_copied_once(tmp_path: Path) -> None:
    """However many tensors a graph says are in it: what is taken is the size of the files."""
    artifact = Artifact.open(artifacts.write_tables(tmp_path / "tables" / "1", rows=100, count=8).path, copies=True)
    size = artifact.manifest.files["weights.bf16"].bytes
    with copied(artifact, artifact.file("cpu.onnx"), Path("nowhere")) as weights:
        assert [array.nbytes for array in weights.files.values()] == [size + -size % 64]


def test_a_graph_without_weights_in_files_needs_no_copy(product: Artifact, tmp_path: Path) -> None:
    graph = tmp_path / "empty.onnx"
    graph.write_bytes(b"")
    with copied(product, graph, tmp_path) as weights:
        assert (weights.where, weights.files, weights.base_dir) == ("in the graph", {}, None)


def test_a_reference_of_files_that_were_cut_short_or_changed_is_damaged(product: Artifact, tmp_path: Path) -> None:
    """Not the end of the process, and not a reference of other weights."""
    load_reference(product, scratch=tmp_path)
    with (product.path / "weights.bf16").open("r+b") as file:
        file.write(bytes(64))
    with pytest.raises(ArtifactDamaged, match=r"weights\.bf16: its sha256 is"):
        load_reference(product, scratch=tmp_path)
    os.truncate(product.path / "residual.bin", 100)
    with pytest.raises(ArtifactDamaged, match=r"residual\.bin: cut short to 100 bytes"):
        load_reference(product, scratch=tmp_path)


LOAD = """
import sys
from pathlib import Path
import numpy as np
from bf16kit.artifact import Artifact
from bf16kit.runtime.loading import load
from peaks import anonymous, peak_anonymous
small, large, scratch = map(Path, sys.argv[1:])
load(Artifact.open(small, copies=True), "cpu", threads=1, scratch=scratch)
artifact = Artifact.open(large, copies=True)
before = anonymous()
with peak_anonymous() as peak:
    runtime = load(artifact, "cpu", threads=1, scratch=scratch)
    runtime.run({"x": np.ones((1, 3072), np.float32)})
print(peak.bytes - before, artifact.manifest.files["weights.bf16"].bytes)
print(next(line.split()[1] for line in open("/proc/self/smaps_rollup") if line.startswith("AnonHugePages")))
"""


@pytest.fixture(scope="module")
def loaded_alone(tmp_path_factory: pytest.TempPathFactory) -> tuple[int, int, int]:
    """Bytes at the peak of loading and a run, of the weights, and of large pages."""
    root = tmp_path_factory.mktemp("alone")
    small = artifacts.write_product(root / "small" / "1").path
    large = artifacts.write_product(root / "large" / "1", width=3072).path
    peak, size, large_pages = map(int, measured_alone(LOAD, str(small), str(large), str(root)).split())
    return peak, size, large_pages * 1024


@KERNEL
def test_copied_weights_are_in_memory_once_also_while_they_are_loaded(loaded_alone: tuple[int, int, int]) -> None:
    peak, size, _ = loaded_alone
    assert size <= peak < 1.5 * size, f"{peak / size:.2f} times the weights"


@KERNEL
@pytest.mark.skipif(
    not LARGE_PAGES.exists() or "[never]" in LARGE_PAGES.read_text(), reason="this system has no large pages on request"
)
def test_what_the_kernel_reads_is_in_large_pages(loaded_alone: tuple[int, int, int]) -> None:
    _, size, large_pages = loaded_alone
    assert large_pages >= size // LARGE_PAGE * LARGE_PAGE


@KERNEL
def test_a_session_that_outlives_its_runtime_still_has_its_weights(product: Artifact, tmp_path: Path) -> None:
    """``close`` is for a model that somebody may be running."""
    runtime = load(product, "cpu", threads=1, scratch=tmp_path)
    right = runtime.run({"x": X})["y"]
    session = vars(runtime)["_session"]
    runtime.close()
    del runtime
    gc.collect()
    taken = [own_memory(2 * WIDTH * WIDTH) for _ in range(4)]
    for memory in taken:
        memory[:] = 255
    np.testing.assert_array_equal(session.run(None, {"x": X})[0], right)


@KERNEL
def test_what_something_else_reads_too_stays_in_the_file(tmp_path: Path) -> None:
    """ONNX Runtime may fold it while it opens the session."""
    w = np.zeros((32, 32), ml_dtypes.bfloat16)
    ours = helper.make_node("MatMul", ["x", "w"], ["y"], domain=DOMAIN)
    other = helper.make_node("Cast", ["w"], ["z"], to=TensorProto.FLOAT)
    weights = [graphs.initializer("w", w)]
    edges = [graphs.edge("x", ["rows", 32])], [graphs.edge("y", ["rows", 32])]
    assert weights_of(graphs.model([ours], *edges, weights).SerializeToString()) == {"w"}
    assert weights_of(graphs.model([ours, other], *edges, weights).SerializeToString()) == frozenset()
    given_out = edges[0], [graphs.edge("w", [32, 32])]
    assert weights_of(graphs.model([ours], *given_out, weights).SerializeToString()) == frozenset()
