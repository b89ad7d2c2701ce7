"""Writing an artifact's weights, graphs, exports and traced formats (:data:`TRACED`), and reading all back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from bf16kit.converter.source import TorchModel


@dataclass(frozen=True, slots=True)
class TracedFormat:
    """A format that torch writes before graphs are planned: its file, its name for users, its step for the progress.

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
        from bf16kit.converter.write import script, torchscript

        if self.format == "pt2":
            torchscript.narrow_and_export(model, path)
        elif model.script is not None:
            script.narrow_script(model.script, path)
        else:
            torchscript.narrow_and_trace(model, path, strictly=strictly)


TRACED: Mapping[str, TracedFormat] = {
    "torchscript": TracedFormat("torchscript", "model.torchscript.pt", "TorchScript", "tracing TorchScript"),
    "pt2": TracedFormat("pt2", "model.pt2", "torch.export program", "exporting with torch.export"),
}
