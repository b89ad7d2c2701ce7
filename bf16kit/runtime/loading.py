"""Loads a runtime from an artifact: a profile or the fp32 reference; and chooses a profile for a device.

Heavy packages are imported only when needed: a server of ONNX artifacts never imports torch.
"""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

from bf16kit.artifact.artifact import Artifact
from bf16kit.artifact.manifest import ProfileEntry
from bf16kit.messages.errors import ArtifactError, ConfigError, DeviceUnavailable, RuntimeFailure
from bf16kit.numerics.tensors import TensorSpec
from bf16kit.runtime import Runtime
from bf16kit.runtime.device import CPU, canonical
from bf16kit.runtime.memory.weightstore import PRIVATE_STORE, WeightStore
from bf16kit.system.controlgroup import release_free_memory

if TYPE_CHECKING:
    from bf16kit.runtime.memory.weights import Weights

AUTO = "auto"
CPU_PROFILES = ("cpu", "cpu-bf16")  # run by ONNX Runtime, the more accurate first
TORCH_PROFILES = ("torchscript", "pt2")  # run by torch, on any device
REFERENCE = "reference"


def load(
    artifact: Artifact,
    profile: str,
    *,
    device: str = CPU,
    threads: int | None = None,
    scratch: Path | None = None,
    weights: WeightStore = PRIVATE_STORE,
) -> Runtime:
    """Load the artifact's ``profile`` (cpu, cpu-bf16, cuda, torchscript, pt2) on ``device`` and probe its accumulation.

    ``threads`` is how many threads work on one run on the CPU; None is one per available CPU. A session maps its
    weights from the artifact's files. If the artifact was opened with ``copies``, they are in ``weights`` and in a
    temporary file in ``scratch`` (None: the system's directory) instead, so that later changes to the artifact do not
    affect the session.

    Raises :class:`ArtifactError` when the artifact has no such profile, :class:`ConfigError` for a device that the
    profile does not support, :class:`DeviceUnavailable` or :class:`RuntimeFailure` when it cannot be loaded there, for
    example because ONNX Runtime is older than the profile requires.
    """
    entry = _profile(artifact, profile)
    device = canonical(device)
    if profile == "cuda" and device == CPU:
        raise DeviceUnavailable("profile cuda needs a CUDA device, but the device is cpu; use profile cpu")
    if profile in CPU_PROFILES and device != CPU:
        raise ConfigError(f"profile {profile} runs on the CPU, not on {device}; use profile cuda, torchscript or pt2")
    inputs, outputs = _inputs_and_outputs(artifact)
    path = artifact.file(entry.graph)
    if entry.format == "torchscript":
        from bf16kit.runtime.torchscript import TorchScriptRuntime

        return TorchScriptRuntime(path, inputs, outputs, device=device, threads=threads)
    if entry.format == "pt2":
        from bf16kit.runtime.torchexport import TorchExportRuntime

        return TorchExportRuntime(path, inputs, outputs, device=device, threads=threads)
    from bf16kit.runtime.memory.weights import Weights, copied_weights
    from bf16kit.runtime.ort.externaldata import check_locations
    from bf16kit.runtime.ort.kernel import NOT_NEEDED, kernel_for, read_as_stored
    from bf16kit.runtime.ort.onnx import OnnxRuntime
    from bf16kit.runtime.ort.session import check_version

    check_version(profile, entry.requires)
    graph = check_locations(path, artifact.manifest.files)
    kernel = kernel_for(graph) if device == CPU else NOT_NEEDED
    given = read_as_stored(graph, kernel=bool(kernel.path)) if artifact.copies and device == CPU else ()
    mapped = nullcontext(Weights(path, ""))
    with copied_weights(artifact, path, scratch, given, weights) if artifact.copies else mapped as found:
        runtime = OnnxRuntime(
            found.model,
            inputs,
            outputs,
            device=device,
            profile=profile,
            precision=entry.precision,
            threads=threads,
            files=found.files,
            values=found.values,
            base_dir=found.base_dir,
            name=entry.graph,
            kernel=kernel,
        )
    if profile == "cpu-bf16" and runtime.info.accumulation != "fp32":
        runtime.close()
        raise RuntimeFailure(
            f"profile {profile} needs fp32 accumulation, but the accumulation probe found"
            f" {runtime.info.accumulation} here; use profile cpu"
        )
    release_free_memory()  # memory of reading the graph and of the probe: 3 MB
    return runtime


def load_reference(
    artifact: Artifact,
    *,
    threads: int | None = None,
    low_priority: bool = False,
    scratch: Path | None = None,
    weights: WeightStore | None = None,
    rebuilt: Weights | None = None,
) -> Runtime:
    """Load the model in fp32 on the CPU, its weights rebuilt from the bf16 ones and the residual.

    The weights are in a temporary file without a name in ``scratch`` (None: the system's directory), mapped. They are
    in memory if the directory is read-only, full or a tmpfs; the runtime's note says which. With ``low_priority`` a run
    uses only the calling thread, unless ``threads`` says otherwise, so that it does not slow live requests down. With
    ``weights`` the large ones are in that store's memory, which several processes may share; products read them there,
    and ONNX Runtime makes no rearranged copy. ``rebuilt`` are the weights if the caller has rebuilt them already.

    Raises :class:`ArtifactError` when the artifact has no reference, or no residual to rebuild it from.
    """
    from bf16kit.runtime.memory.weights import rebuilt_weights
    from bf16kit.runtime.ort.externaldata import REBUILT, check_locations
    from bf16kit.runtime.ort.onnx import OnnxRuntime

    name = artifact.manifest.reference
    if name is None:
        reason = "no ONNX graph could be made of its source" if artifact.manifest.checkpoint else ""
        remedy = reason or "convert the checkpoint again with the residual"
        raise ArtifactError(f"{artifact.path} has no fp32 reference; {remedy}")
    graph = artifact.file(name)
    check_locations(graph, {*artifact.manifest.files, REBUILT})
    inputs, outputs = _inputs_and_outputs(artifact)
    given = nullcontext(rebuilt) if rebuilt is not None else rebuilt_weights(artifact, graph, scratch, weights)
    with given as found:
        if artifact.copies:
            artifact.verify()  # checks that the files did not change while they were read
        return OnnxRuntime(
            found.model,
            inputs,
            outputs,
            device=CPU,
            profile=REFERENCE,
            precision="fp32",
            threads=1 if low_priority and threads is None else threads,
            files=found.files,
            values=found.values,
            base_dir=found.base_dir,
            pack=not found.values,
            name=name,
            note=f"the fp32 reference, its weights rebuilt from bf16 and the residual {found.where}",
        )


def choose_profiles(artifact: Artifact, profile: str, device: str) -> tuple[tuple[str, ...], str]:
    """Return the profiles of ``artifact`` that may serve on a device, best first, and that device.

    ``device`` is auto, cpu or cuda:N. If ``profile`` is not auto, it is the only one.

    Raises :class:`ArtifactError` when the artifact has no such profile, or none for the device.
    """
    if profile != AUTO:
        _profile(artifact, profile)
        return (profile,), _device_for(profile) if device == AUTO else canonical(device)
    first, where = choose_profile(artifact, device)
    if first not in CPU_PROFILES:
        return (first,), where
    return tuple(name for name in CPU_PROFILES if name in artifact.manifest.profiles), where


def _device_for(profile: str) -> str:
    """Return the device for a profile that was named without a device."""
    on_cuda = profile == "cuda" or (profile in TORCH_PROFILES and _torch_cuda_works())
    return "cuda:0" if on_cuda else CPU


def choose_profile(artifact: Artifact, device: str) -> tuple[str, str]:
    """Return the best profile for ``device`` (auto, cpu or cuda:N) and its device; on the CPU the most accurate one.

    ``auto`` takes CUDA if the artifact has a profile for it and a device actually works, else the CPU. Raises
    :class:`ArtifactError` when the artifact has no profile for the device.
    """
    if device != AUTO:
        device = canonical(device)
        return _profile_for(artifact, device), device
    profiles = artifact.manifest.profiles
    if "cuda" in profiles and _onnx_cuda_works():
        return "cuda", "cuda:0"
    if profiles and profiles.keys() <= set(TORCH_PROFILES) and _torch_cuda_works():
        return next(name for name in TORCH_PROFILES if name in profiles), "cuda:0"
    return _profile_for(artifact, CPU), CPU


def _profile_for(artifact: Artifact, device: str) -> str:
    preferred: tuple[str, ...] = (*(CPU_PROFILES if device == CPU else ("cuda",)), *TORCH_PROFILES)
    for profile in preferred:
        if profile in artifact.manifest.profiles:
            return profile
    _check_served(artifact)
    raise ArtifactError(
        f"{artifact.path} has no profile for {device}: it needs {' or '.join(preferred)},"
        f" but has {_names(artifact)}; convert the checkpoint again with the profile wanted"
    )


def _profile(artifact: Artifact, profile: str) -> ProfileEntry:
    entry = artifact.manifest.profiles.get(profile)
    if entry is None:
        _check_served(artifact)
        raise ArtifactError(f"{artifact.path} has no profile {profile!r}; it has {_names(artifact)}")
    return entry


def _check_served(artifact: Artifact) -> None:
    """Raise ArtifactError if the artifact has only exports, which are for other programs."""
    exports = artifact.manifest.exports
    if exports and not artifact.manifest.profiles:
        raise ArtifactError(
            f"{artifact.path} is an export ({', '.join(sorted(exports))}) for other programs to load: it has no profile"
            " to serve; convert the checkpoint again with --format onnx"
        )


def _names(artifact: Artifact) -> str:
    return ", ".join(sorted(artifact.manifest.profiles)) or "none"


def _inputs_and_outputs(artifact: Artifact) -> tuple[tuple[TensorSpec, ...], tuple[TensorSpec, ...]]:
    manifest = artifact.manifest
    return tuple(entry.spec() for entry in manifest.inputs), tuple(entry.spec() for entry in manifest.outputs)


def _onnx_cuda_works() -> bool:
    from bf16kit.runtime.ort.session import has_cuda
    from bf16kit.runtime.probe import probe_onnx

    if not has_cuda():
        return False
    try:
        probe_onnx("cuda:0", "bf16")
    except RuntimeFailure:
        return False
    return True


def _torch_cuda_works() -> bool:
    from bf16kit.runtime.torchscript import cuda_works

    return cuda_works()
