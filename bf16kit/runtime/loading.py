"""Loads a runtime from an artifact: a profile or the fp32 reference; and chooses a profile for a device.

Heavy packages are imported only when needed: a server of ONNX artifacts never imports torch.
"""

from __future__ import annotations

from collections.abc import Collection
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from bf16kit.artifact.artifact import Artifact
from bf16kit.artifact.manifest import ProfileEntry
from bf16kit.messages.errors import ArtifactError, ConfigError, DeviceUnavailable, RuntimeFailure
from bf16kit.numerics.tensors import TensorSpec
from bf16kit.runtime import CPU, Runtime, canonical
from bf16kit.runtime.memory.weightstore import PRIVATE_STORE, WeightStore

if TYPE_CHECKING:
    from bf16kit.runtime.memory.weights import Weights

AUTO = "auto"
CPU_PROFILES = ("cpu", "cpu-bf16")  # run by ONNX Runtime, the more accurate first
TORCH_PROFILES = ("torchscript", "pt2")  # run by torch, on any device


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
    temporary file in ``scratch`` (None: the system's directory), out of reach of later changes to the artifact.

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
    path, signature = artifact.file(entry.graph), _signature(artifact)
    if entry.format != "onnx":
        from bf16kit.runtime.torchruntimes import TorchExportRuntime, TorchScriptRuntime

        kind = TorchScriptRuntime if entry.format == "torchscript" else TorchExportRuntime
        return kind(path, *signature, device=device, threads=threads)
    from bf16kit.runtime.memory.weights import Weights, gathered_weights
    from bf16kit.runtime.ort.onnx import OnnxRuntime
    from bf16kit.runtime.ort.onnxgraph import check_locations, kernel_for, read_in_place
    from bf16kit.runtime.ort.session import check_version

    check_version(profile, entry.requires)
    graph = check_locations(path, artifact.manifest.files)
    given = read_in_place(graph, kernel=bool(kernel_for(graph).path)) if artifact.copies and device == CPU else ()
    mapped = nullcontext(Weights(path, ""))
    with gathered_weights(artifact, graph, scratch, given, weights) if artifact.copies else mapped as found:
        runtime = OnnxRuntime(
            found.model,
            *signature,
            device=device,
            profile=profile,
            precision=entry.precision,
            threads=threads,
            name=entry.graph,
            graph=graph,
            **found.options,
        )
    if profile == "cpu-bf16" and runtime.info.accumulation != "fp32":
        runtime.close()
        raise RuntimeFailure(
            f"profile {profile} needs fp32 accumulation, but the accumulation probe found"
            f" {runtime.info.accumulation} here; use profile cpu"
        )
    return runtime


def load_reference(
    artifact: Artifact,
    *,
    threads: int | None = None,
    scratch: Path | None = None,
    weights: WeightStore | None = None,
    rebuilt: Weights | None = None,
) -> Runtime:
    """Load the model in fp32 on the CPU, its weights rebuilt from the bf16 ones and the residual.

    The weights are in a temporary file without a name in ``scratch`` (None: the system's directory), mapped. They are
    in memory if the directory is read-only, full or a tmpfs; the runtime's note says which. With ``weights`` the large
    ones are in that store's memory, which several processes may share; products read them there, and ONNX Runtime makes
    no rearranged copy. ``rebuilt`` are the weights if the caller has rebuilt them already.

    Raises :class:`ArtifactError` when the artifact has no reference, or no residual to rebuild it from.
    """
    from bf16kit.runtime.memory.weights import rebuilt_weights
    from bf16kit.runtime.ort.onnx import OnnxRuntime

    name = artifact.manifest.reference
    if name is None:
        reason = "no ONNX graph could be made of its source" if artifact.manifest.checkpoint else ""
        remedy = reason or "convert the checkpoint again with the residual"
        raise ArtifactError(f"{artifact.path} has no fp32 reference; {remedy}")
    given = None if rebuilt is None else nullcontext(rebuilt)
    with given or rebuilt_weights(artifact, artifact.file(name), scratch, weights) as found:
        if artifact.copies:
            artifact.verify()  # checks that the files did not change while they were read
        return OnnxRuntime(
            found.model,
            *_signature(artifact),
            profile="reference",
            precision="fp32",
            threads=threads,
            pack=not found.values,
            name=name,
            note=f"the fp32 reference, its weights rebuilt from bf16 and the residual {found.where}",
            **found.options,
        )


def choose_profiles(artifact: Artifact, profile: str, device: str) -> tuple[tuple[str, ...], str]:
    """Return the profiles of ``artifact`` that may serve on a device, best first, and that device.

    ``device`` is auto, cpu or cuda:N. ``auto`` takes CUDA if the artifact has a profile for it and a device actually
    works, else the CPU. If ``profile`` is not auto, it is the only one; on the CPU there may be several, the most
    accurate first.

    Raises :class:`ArtifactError` when the artifact has no such profile, or none for the device.
    """
    profiles = {profile: _profile(artifact, profile)} if profile != AUTO else artifact.manifest.profiles
    if device == AUTO:
        device = "cuda:0" if profile == "cuda" or _cuda_works(profiles) else CPU
    device = canonical(device)
    if profile != AUTO:
        return (profile,), device
    preferred = (*(CPU_PROFILES if device == CPU else ("cuda",)), *TORCH_PROFILES)
    found = [name for name in preferred if name in profiles]
    if not found:
        raise _missing(artifact, f"no profile for {device}: it needs {' or '.join(preferred)}, but has")
    return tuple(name for name in found if name in CPU_PROFILES) or (found[0],), device


def _profile(artifact: Artifact, profile: str) -> ProfileEntry:
    entry = artifact.manifest.profiles.get(profile)
    if entry is None:
        raise _missing(artifact, f"no profile {profile!r}; it has")
    return entry


def _missing(artifact: Artifact, what: str) -> ArtifactError:
    """Return the error for a profile that the artifact does not have; one with exports only is for other programs."""
    exports, profiles = artifact.manifest.exports, artifact.manifest.profiles
    if exports and not profiles:
        return ArtifactError(
            f"{artifact.path} is an export ({', '.join(sorted(exports))}) for other programs to load: it has no profile"
            " to serve; convert the checkpoint again with --format onnx"
        )
    return ArtifactError(
        f"{artifact.path} has {what} {', '.join(sorted(profiles)) or 'none'}; convert the checkpoint again with the"
        " profile wanted"
    )


def _signature(artifact: Artifact) -> tuple[tuple[TensorSpec, ...], tuple[TensorSpec, ...]]:
    manifest = artifact.manifest
    return tuple(entry.spec() for entry in manifest.inputs), tuple(entry.spec() for entry in manifest.outputs)


def _cuda_works(profiles: Collection[str]) -> bool:
    """Return whether a device works for the first of ``profiles`` that runs on CUDA."""
    if "cuda" in profiles:
        from bf16kit.runtime.probe import probe_onnx

        with suppress(RuntimeFailure):
            probe_onnx("cuda:0", "bf16")
            return True
    elif profiles and set(profiles) <= set(TORCH_PROFILES):
        from bf16kit.runtime.torchruntimes import cuda_works

        return cuda_works()
    return False
