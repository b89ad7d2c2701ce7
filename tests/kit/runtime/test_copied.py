"""A runtime with its own copy of the weights gives the same outputs, whatever happens to the artifact's files."""

import gc
import os
import shutil
from pathlib import Path

import artifacts
import numpy as np
import onnxruntime
import pytest
import torch
from architectures import Mlp
from converting import MLP, ONNX_ONLY
from keptweights import KeptWeights
from peaks import measured_alone

import graphs
from bf16kit.artifact.artifact import Artifact
from bf16kit.converter.cli import run
from bf16kit.messages.errors import ArtifactDamaged
from bf16kit.numerics.tensors import TensorSpec
from bf16kit.runtime.loading import load, load_reference
from bf16kit.runtime.memory.weights import gathered_weights
from bf16kit.runtime.memory.weightstore import LARGE_PAGE, PRIVATE_STORE
from bf16kit.runtime.ort.kernel import LIBRARY
from bf16kit.runtime.ort.onnxgraph import check_locations

KERNEL = pytest.mark.skipif(not LIBRARY.exists(), reason="the kernel was not built: no C++17 compiler")
LARGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")

WIDTH = 512
X = np.linspace(-1, 1, 2 * WIDTH, dtype=np.float32).reshape(2, WIDTH)


@pytest.fixture
def product(tmp_path: Path) -> Artifact:
    """Return an artifact to be copied. Without the copy, each run would read its weights from the mapped file."""
    path = artifacts.write_product(tmp_path / "product" / "1", width=WIDTH).path
    return Artifact.open(path, copies=True)


@pytest.mark.parametrize("scratch", ["disk", "/dev/shm", "nowhere"])
def test_outputs_stay_the_same_if_files_are_changed_truncated_and_deleted(
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
    """Return an artifact whose biases stay fp32, in a file that the reference reads without restoring anything."""
    root = tmp_path_factory.mktemp("partly")
    torch.save(Mlp().state_dict(), root / "mlp.pt")
    to = ("--out", root / "made" / "1", "--keep-fp32", "bias")
    assert run([str(each) for each in ("checkpoint", root / "mlp.pt", *MLP, *ONNX_ONLY, *to)]) == 0
    shutil.copytree(root / "made", root / "mlp")  # no code in this process has mapped the copy
    return Artifact.open(root / "mlp" / "1", copies=True)


@pytest.mark.long
@pytest.mark.parametrize("scratch", ["disk", "/dev/shm", "nowhere"])
def test_the_reference_copies_fp32_weights_instead_of_mapping_them(
    partly_fp32: Artifact, tmp_path: Path, scratch: str
) -> None:
    assert "weights.fp32" in partly_fp32.manifest.files
    reference = load_reference(partly_fp32, threads=1, scratch=tmp_path if scratch == "disk" else Path(scratch))
    assert str(partly_fp32.path) not in Path("/proc/self/maps").read_text()
    golden = partly_fp32.golden()
    answers = reference.run(golden.inputs)
    for name, right in golden.outputs.items():
        np.testing.assert_allclose(answers[name], right, rtol=1e-5, atol=1e-6)


def test_a_file_with_several_tensors_is_copied_once(tmp_path: Path) -> None:
    """The copies take the size of the files, no matter how many tensors of the graph refer to them."""
    artifact = Artifact.open(artifacts.write_tables(tmp_path / "tables" / "1", rows=100, count=8).path, copies=True)
    size = artifact.manifest.files["weights.bf16"].bytes
    graph = check_locations(artifact.file("cpu.onnx"), artifact.manifest.files)
    with gathered_weights(artifact, graph, Path("nowhere"), (), PRIVATE_STORE) as weights:
        assert [array.nbytes for array in weights.files.values()] == [size + -size % 64]


@pytest.mark.parametrize("store", [None, KeptWeights()], ids=["a file", "a store"])
def test_loading_from_changed_or_truncated_files_fails(
    product: Artifact, tmp_path: Path, store: KeptWeights | None
) -> None:
    """The process must not crash, and must not load other weights or keep them in the store."""
    with (product.path / "weights.bf16").open("r+b") as file:
        file.write(bytes(64))
    with pytest.raises(ArtifactDamaged, match=r"weights\.bf16"):
        load_reference(product, scratch=tmp_path, weights=store)
    with pytest.raises(ArtifactDamaged, match=r"weights\.bf16"):
        load(product, "cpu", threads=1, scratch=tmp_path, weights=PRIVATE_STORE if store is None else store)
    os.truncate(product.path / "residual.bin", 100)
    with pytest.raises(ArtifactDamaged, match=r"residual\.bin"):
        load_reference(product, scratch=tmp_path, weights=store)
    assert store is None or store.arrays == {}
    assert not any(path.name.startswith(".") for path in tmp_path.iterdir())


LOAD = """
import sys
from pathlib import Path
from bf16kit.artifact.artifact import Artifact
from bf16kit.runtime.loading import load, load_reference
from peaks import anonymous, peak_anonymous
what, (small, large, scratch) = sys.argv[1], map(Path, sys.argv[2:])
def loaded(path):
    artifact = Artifact.open(path, copies=what == "copied")
    if what == "copied":
        return artifact, load(artifact, "cpu", threads=1, scratch=scratch)
    return artifact, load_reference(artifact, threads=1, scratch=scratch)
loaded(small)  # the libraries are in memory from here on
before = anonymous()
with peak_anonymous() as peak:
    artifact, runtime = loaded(large)
    assert runtime.run(artifact.golden().inputs)["y"].any()
print(peak.bytes - before, artifact.manifest.source.bytes)
print(next(line.split()[1] for line in open("/proc/self/smaps_rollup") if line.startswith("AnonHugePages")))
"""


@pytest.fixture(scope="module")
def loaded_alone(tmp_path_factory: pytest.TempPathFactory) -> tuple[int, int, int]:
    """Return three sizes in bytes: the memory added at the peak of a load and a run, the weights, the large pages."""
    root = tmp_path_factory.mktemp("alone")
    small = artifacts.write_product(root / "small" / "1").path
    large = artifacts.write_product(root / "large" / "1", width=3072).path
    peak, size, large_pages = map(int, measured_alone(LOAD, "copied", *map(str, (small, large, root))).split())
    return peak, size // 2, large_pages * 1024  # the source is in fp32


@pytest.mark.long
@pytest.mark.parametrize(("memory", "at_least", "below"), [(False, 0.0, 0.5), (True, 1.0, 3.0)])
def test_a_references_mapped_weights_are_not_held_in_memory(
    tmp_path: Path, memory: bool, at_least: float, below: float
) -> None:
    """Eight tables of 6.4 MB are rebuilt one at a time. If they cannot be mapped, all of them are in memory."""
    small = artifacts.write_tables(tmp_path / "small" / "1", rows=64).path
    large = artifacts.write_tables(tmp_path / "large" / "1", rows=25_000).path
    scratch = "/dev/shm" if memory else str(tmp_path)
    peak, size, _ = map(int, measured_alone(LOAD, "rebuilt", str(small), str(large), scratch).split())
    assert at_least <= peak / size < below, f"{peak / size:.2f} times the weights"


@pytest.mark.long
@KERNEL
def test_copied_weights_are_in_memory_only_once_even_while_loading(loaded_alone: tuple[int, int, int]) -> None:
    peak, size, _ = loaded_alone
    assert size <= peak < 1.5 * size, f"{peak / size:.2f} times the weights"


@pytest.mark.long
@KERNEL
@pytest.mark.skipif(
    not LARGE_PAGES.exists() or "[never]" in LARGE_PAGES.read_text(), reason="this system has no large pages on request"
)
def test_weights_that_the_kernel_reads_are_in_large_pages(loaded_alone: tuple[int, int, int]) -> None:
    _, size, large_pages = loaded_alone
    assert large_pages >= size // LARGE_PAGE * LARGE_PAGE


@KERNEL
def test_a_session_that_outlives_its_runtime_keeps_its_weights(product: Artifact, tmp_path: Path) -> None:
    """``close`` may be called while another thread runs the model."""
    runtime = load(product, "cpu", threads=1, scratch=tmp_path)
    right = runtime.run({"x": X})["y"]
    (session,) = [each for each in vars(runtime).values() if isinstance(each, onnxruntime.InferenceSession)]
    runtime.close()
    del runtime
    gc.collect()
    taken = [PRIVATE_STORE.get("", 2 * WIDTH * WIDTH, lambda memory: memory.fill(255)) for _ in range(4)]
    np.testing.assert_array_equal(session.run(None, {"x": X})[0], right)
    assert all(memory[0] == 255 for memory in taken)


@pytest.mark.parametrize("how", ["as it is", "without the kernel"])
def test_tables_in_the_store_give_the_same_outputs_as_tables_in_the_file(
    tmp_path: Path, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if how == "without the kernel":
        monkeypatch.setenv("BF16KIT_KERNEL_PATH", "off")
    path = artifacts.write_artifact(
        tmp_path / "lookup" / "1",
        lambda weight: f"y = Gather ({weight('table')}, ids)",
        {"table": np.linspace(-1, 1, 32 * WIDTH, dtype=np.float32).reshape(WIDTH, 32)},
        [TensorSpec("ids", "int64", ("n",))],
        [TensorSpec("y", "float32", ("n",))],
        {},
        kernel=graphs.parsed("(int64[n] ids) => (float[n] y) { row = Gather (table, ids) y = Cast <to = 1> (row) }"),
    ).path
    feeds = {"ids": np.arange(32 * WIDTH)}
    right = load(Artifact.open(path), "cpu", threads=1).run(feeds)["y"]
    assert len(np.unique(right)) > 1000
    store = KeptWeights()
    runtime = load(Artifact.open(path, copies=True), "cpu", threads=1, scratch=tmp_path, weights=store)
    np.testing.assert_array_equal(runtime.run(feeds)["y"], right)
    assert [size for _, size in store.arrays] == [32 * WIDTH * 2]


@KERNEL
def test_the_key_of_a_copy_depends_only_on_its_content(tmp_path: Path) -> None:
    """Artifacts with other names but the same bytes in the same places get the same key; other bytes get another."""
    store, sizes = KeptWeights(), []
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        path = artifacts.write_product(tmp_path / name / "1", width=WIDTH, seed=seed).path
        load(Artifact.open(path, copies=True), "cpu", threads=1, scratch=tmp_path, weights=store)
        sizes.append(len(store.arrays))
    assert sizes == [1, 1, 2]
