"""Loading a published artifact into a runtime."""

import subprocess
import sys
from pathlib import Path
from typing import Literal

import artifacts
import numpy as np
import pytest
import torch
from keptweights import KeptWeights

import graphs
from bf16kit.artifact.artifact import Artifact
from bf16kit.artifact.manifest import Manifest, ProfileEntry
from bf16kit.messages.errors import ArtifactError, ConfigError, DeviceUnavailable, RuntimeFailure
from bf16kit.runtime.loading import choose_profiles, load, load_reference
from bf16kit.runtime.ort.session import as_runtime_failure, has_cuda

WIDTH = 64
no_cuda = pytest.mark.skipif(has_cuda() or torch.cuda.is_available(), reason="this machine may run CUDA")


@pytest.fixture(scope="module")
def mlp(tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    return artifacts.write_mlp(tmp_path_factory.mktemp("repository") / "mlp" / "1", width=WIDTH)


def with_profiles(artifact: Artifact, *names: str) -> Artifact:
    """Return the same artifact with profiles of these names in its manifest."""

    def entry(name: str) -> ProfileEntry:
        kind: Literal["onnx", "torchscript"] = "torchscript" if name == "torchscript" else "onnx"
        return ProfileEntry(format=kind, graph="cpu.onnx", precision="bf16", verified="no")

    manifest: Manifest = artifact.manifest.model_copy(update={"profiles": {name: entry(name) for name in names}})
    return Artifact(artifact.path, manifest)


def test_loading_onnx_artifacts_never_imports_torch(mlp: Artifact) -> None:
    """A server for ONNX artifacts may be installed without torch."""
    program = (
        "import sys, bf16kit.runtime.loading as loading\n"
        "assert not {'torch', 'onnxruntime', 'onnx'} & sys.modules.keys()\n"
        "from bf16kit.artifact.artifact import Artifact\n"
        "artifact = Artifact.open(sys.argv[1])\n"
        "loading.load(artifact, loading.choose_profiles(artifact, 'auto', 'cpu')[0][0])\n"
        "loading.load_reference(artifact)\n"
        "assert 'torch' not in sys.modules\n"
    )
    done = subprocess.run([sys.executable, "-c", program, str(mlp.path)], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_the_cpu_profile_and_the_reference_run_and_report_their_precision(mlp: Artifact) -> None:
    loaded, golden = load(mlp, "cpu", threads=1), mlp.golden()
    info = loaded.info
    assert (info.backend, info.device, info.profile) == ("onnxruntime", "cpu", "cpu")
    assert (info.precision, info.accumulation) == ("bf16-weights", "fp32")
    found = loaded.run(golden.inputs)["y"]
    assert 0 < np.linalg.norm(found - golden.outputs["y"]) / np.linalg.norm(golden.outputs["y"]) < 1e-2
    reference, x = load_reference(mlp), graphs.values(5, WIDTH, seed=3)
    first, second = (mlp.restore(name).astype(np.float64) for name in ("a", "b"))
    np.testing.assert_allclose(reference.run({"x": x})["y"], np.maximum(x @ first, 0) @ second, rtol=2e-5, atol=1e-6)
    info = reference.info
    assert (info.profile, info.device, info.precision, info.accumulation) == ("reference", "cpu", "fp32", "fp32")


@pytest.mark.parametrize(
    ("scratch", "where"),
    [(None, "in a temporary file"), (Path("/dev/shm"), "in memory, because /dev/shm lies in memory")],
)
def test_a_reference_gives_the_same_outputs_from_mapped_weights_and_from_memory(
    mlp: Artifact, tmp_path: Path, scratch: Path | None, where: str
) -> None:
    before, golden = set(Path("/proc/self/task").iterdir()), mlp.golden()
    reference = load_reference(mlp, scratch=scratch or tmp_path, threads=1)
    # a thread pool of its own would run at normal priority, whatever the caller's priority is
    assert set(Path("/proc/self/task").iterdir()) <= before
    assert reference.info.note.endswith(where)
    assert list(tmp_path.iterdir()) == []  # not even while it is loaded
    np.testing.assert_array_equal(reference.run(golden.inputs)["y"], golden.outputs["y"])


def test_references_with_one_store_share_one_copy_of_their_weights(mlp: Artifact) -> None:
    """Several workers share their weights in this way. Sharing does not change the outputs."""
    store = KeptWeights()
    golden = mlp.golden()
    for reference in (load_reference(mlp, weights=store), load_reference(mlp, weights=store)):
        np.testing.assert_allclose(reference.run(golden.inputs)["y"], golden.outputs["y"], rtol=1e-5, atol=1e-6)
    (memory,) = store.arrays.values()
    assert memory.nbytes == 2 * WIDTH * WIDTH * 4
    assert not memory.flags.writeable


def test_what_an_artifact_does_not_have_is_named_in_the_error(mlp: Artifact) -> None:
    bare = Artifact(mlp.path, mlp.manifest.model_copy(update={"reference": None}))
    with pytest.raises(ArtifactError, match="no fp32 reference"):
        load_reference(bare)
    with pytest.raises(ArtifactError, match="no profile 'cuda'; it has cpu"):
        load(mlp, "cuda", device="cuda:0")
    with pytest.raises(ArtifactError, match="no profile for cuda:0: it needs cuda or torchscript or pt2, but has cpu"):
        choose_profiles(mlp, "auto", "cuda:0")
    with pytest.raises(ConfigError, match="unknown device 'tpu'"):
        choose_profiles(mlp, "auto", "tpu")


def test_a_profile_is_rejected_on_the_wrong_kind_of_device(mlp: Artifact) -> None:
    both = with_profiles(mlp, "cpu", "cuda")
    with pytest.raises(DeviceUnavailable, match="profile cuda needs a CUDA device"):
        load(both, "cuda", device="cpu")
    with pytest.raises(ConfigError, match="profile cpu runs on the CPU, not on cuda:0"):
        load(both, "cpu", device="cuda:0")


@no_cuda
def test_the_error_for_cuda_without_a_cuda_build_and_a_driver_names_both(mlp: Artifact) -> None:
    cuda = with_profiles(mlp, "cuda")
    assert choose_profiles(cuda, "cuda", "auto") == (("cuda",), "cuda:0")
    said = r"no CUDA provider; install bf16kit\[gpu\].* NVIDIA's driver is missing \(libcuda\.so\.1: .*nvidia-smi"
    with pytest.raises(DeviceUnavailable, match=said):
        load(cuda, "cuda", device="cuda:0")


@pytest.mark.parametrize(
    ("error", "expected", "said"),
    [
        ("CUDA failure 100: no CUDA-capable device is detected ; GPU=-1", DeviceUnavailable, "detected; check"),
        ("CUDA failure 35: CUDA driver version is insufficient ; GPU=-1", DeviceUnavailable, "check that nvidia-smi"),
        ("CUDA failure 2: out of memory ; GPU=0 ; hostname=h", RuntimeFailure, "out of memory"),
    ],
)
def test_an_error_of_cuda_about_its_device_means_that_there_is_none(
    error: str, expected: type[RuntimeFailure], said: str
) -> None:
    """The converter emulates the profile then; the texts are onnxruntime-gpu 1.31.1's."""
    with pytest.raises(RuntimeFailure, match=said) as raised, as_runtime_failure("cannot load"):
        raise RuntimeError(error)
    assert type(raised.value) is expected


@pytest.mark.parametrize(
    ("profiles", "device", "expected"),
    [
        (("cpu", "cuda", "torchscript"), "cpu", (("cpu",), "cpu")),
        (("cpu", "cpu-bf16", "cuda"), "cpu", (("cpu", "cpu-bf16"), "cpu")),
        (("cpu", "cuda", "torchscript"), "cuda:1", (("cuda",), "cuda:1")),
        (("cpu", "torchscript"), "cuda", (("torchscript",), "cuda:0")),
        (("torchscript",), "cpu", (("torchscript",), "cpu")),
    ],
)
def test_the_device_decides_the_profile(
    mlp: Artifact, profiles: tuple[str, ...], device: str, expected: tuple[tuple[str, ...], str]
) -> None:
    assert choose_profiles(with_profiles(mlp, *profiles), "auto", device) == expected


@no_cuda
@pytest.mark.parametrize(
    ("profiles", "expected"), [(("cpu", "cuda", "torchscript"), "cpu"), (("cuda", "torchscript"), "torchscript")]
)
def test_auto_selects_the_cpu_if_no_cuda_device_works(mlp: Artifact, profiles: tuple[str, ...], expected: str) -> None:
    assert choose_profiles(with_profiles(mlp, *profiles), "auto", "auto") == ((expected,), "cpu")
