"""How much disk an artifact takes, in parts, and how that compares with the fp32 checkpoint it was made from."""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import dataclass

from bf16kit.artifact.artifact import Artifact
from bf16kit.artifact.manifest import MANIFEST, RESIDUAL, FileEntry, Manifest
from bf16kit.artifact.reading import damaged_if_unreadable
from bf16kit.messages.wording import size


@dataclass(frozen=True, slots=True)
class DiskSize:
    """Bytes of the parts of an artifact, beside the ``checkpoint``'s: its tensors at their own dtypes.

    ``weights`` are the files that every ONNX profile reads, bf16 and fp32. ``residual`` restores fp32. ``copies`` hold
    the weights again, for TorchScript, ``torch.export`` and other programs. ``rest`` is everything else: graphs, golden
    samples, manifest, measurements, report.
    """

    checkpoint: int
    weights: int
    residual: int
    copies: int
    rest: int

    @classmethod
    def of(cls, manifest: Manifest, files: Mapping[str, FileEntry], unlisted: int) -> DiskSize:
        """Part ``files``; ``unlisted`` counts the bytes of files that are not among them, as the manifest's own."""
        stored = {"weights.bf16", "weights.fp32", *(tensor.file for tensor in manifest.tensors)} - {RESIDUAL}
        copies = {entry.graph for entry in manifest.profiles.values() if entry.format != "onnx"}
        copies = copies.union(*(entry.files for entry in manifest.exports.values())) - stored

        def total(names: Set[str]) -> int:
            return sum(entry.bytes for name, entry in files.items() if name in names)

        rest = files.keys() - stored - {RESIDUAL} - copies
        return cls(manifest.source.bytes, total(stored), total({RESIDUAL}), total(copies), unlisted + total(rest))

    @property
    def total(self) -> int:
        """All bytes of the artifact."""
        return self.weights + self.residual + self.copies + self.rest

    @property
    def weights_ratio(self) -> float:
        """The weights ÷ the checkpoint."""
        return self.weights / max(1, self.checkpoint)

    @property
    def total_ratio(self) -> float:
        """All bytes ÷ the checkpoint."""
        return self.total / max(1, self.checkpoint)

    @property
    def parts(self) -> dict[str, int]:
        """Bytes by the name that users see, without the parts that this artifact does not have."""
        named = {"weights": self.weights, "residual": self.residual, "other formats": self.copies, "rest": self.rest}
        return {name: count for name, count in named.items() if count}

    def __str__(self) -> str:
        parts = ", ".join(f"{name} {size(count)}" for name, count in self.parts.items())
        return f"{size(self.total)} on disk, {self.total_ratio:.3f} × the checkpoint: {parts}"


def disk_size(artifact: Artifact) -> DiskSize:
    """Return the size of a published artifact; ArtifactDamaged if its manifest is gone."""
    with damaged_if_unreadable(artifact.path / MANIFEST):
        own = (artifact.path / MANIFEST).stat().st_size
    return DiskSize.of(artifact.manifest, artifact.manifest.files, own)
