"""The formats that are written from the torch module itself, before graphs are planned: TorchScript and pt2."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from converter.source import TorchModel


@dataclass(frozen=True, slots=True)
class TracedFormat:
    """One such format: its file in an artifact, its name for users, and the description of its step for the progress.

    The format's name is also the profile's. Writing leaves the module unchanged and always gives the same bytes.
    """

    format: Literal["torchscript", "pt2"]
    file: str
    title: str
    step_name: str

    def write(self, model: TorchModel, path: Path, *, strictly: bool = False) -> None:
        """Write ``model`` in bf16 to ``path``; raise :class:`ConversionError` if torch cannot.

        With ``strictly``, reject a trace that depends on its example. It is set if there is no ONNX graph, which would
        not depend on it.
        """
        if self.format == "torchscript" and model.script is not None:
            from converter.write.script import narrow_script

            narrow_script(model.script, path)
        elif self.format == "torchscript":
            from converter.write.torchscript import narrow_and_trace

            narrow_and_trace(model, path, strictly=strictly)
        else:
            from converter.write.torchscript import narrow_and_export

            narrow_and_export(model, path)


TRACED: Mapping[str, TracedFormat] = {
    traced.format: traced
    for traced in (
        TracedFormat("torchscript", "model.torchscript.pt", "TorchScript", "tracing TorchScript"),
        TracedFormat("pt2", "model.pt2", "torch.export program", "exporting with torch.export"),
    )
}
