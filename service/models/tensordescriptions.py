"""Checks the inputs and outputs in a client's ``ModelConfig``: they cannot be changed, so they must match the model."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Literal, NamedTuple

from pydantic import AliasGenerator, BaseModel, ConfigDict
from pydantic.alias_generators import to_camel

from bf16kit.artifact.artifact import Artifact
from bf16kit.artifact.manifest import SpecEntry
from bf16kit.messages.errors import ArtifactError, InvalidRequest
from bf16kit.messages.wording import quoted
from bf16kit.numerics.tensors import BY_NAME


class Tensor(BaseModel):
    """An input or output as ModelConfig shows it; names in camelCase are accepted too."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, populate_by_name=True, alias_generator=AliasGenerator(validation_alias=to_camel)
    )

    name: str
    data_type: str = ""
    dims: tuple[int, ...] | None = None
    format: Literal["FORMAT_NONE", "FORMAT_NCHW", "FORMAT_NHWC"] = "FORMAT_NONE"  # of an input; it can be changed
    label_filename: Literal[""] = ""
    optional: Literal[False] = False


class TensorDescriptions(NamedTuple):
    """The inputs and outputs that a client described."""

    input: Sequence[Tensor]
    output: Sequence[Tensor]

    def check(self, artifact: Path) -> None:
        """Raise InvalidRequest naming the first field that does not match the artifact.

        An artifact that cannot be read is not checked here: loading it reports the error.
        """
        if not self.input and not self.output:
            return
        try:
            manifest = Artifact.open(artifact, verify=False).manifest
        except (OSError, ArtifactError):
            return
        for field, described, entries in (
            ("input", self.input, manifest.inputs),
            ("output", self.output, manifest.outputs),
        ):
            by_name = {entry.name: entry for entry in entries}
            for tensor in described:
                _check(field, tensor, by_name.get(tensor.name), manifest.batch_axis)


def _check(field: str, tensor: Tensor, entry: SpecEntry | None, batch_axis: int | None) -> None:
    given = f"{field} {quoted(tensor.name)}"
    if entry is None:
        raise InvalidRequest(f"load parameter 'config': the model has no {given}")
    what, oip = f"load parameter 'config': {given}", BY_NAME[entry.dtype].oip
    kind = "TYPE_STRING" if oip == "BYTES" else f"TYPE_{oip}"
    if tensor.data_type not in ("", kind):
        raise InvalidRequest(f"{what} has data_type {quoted(tensor.data_type)}, the model's is {kind}")
    dims = tuple(dim if isinstance(dim, int) else -1 for dim in entry.shape)
    known = [dims] if batch_axis != 0 else [dims[1:], dims]  # ModelConfig leaves the batch dimension out
    if tensor.dims is not None and tensor.dims not in known:
        raise InvalidRequest(f"{what} has dims {list(tensor.dims)[:16]}, the model's are {list(known[0])}")
