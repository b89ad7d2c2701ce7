"""The formats that are written from the torch module itself, once, before graphs are planned: TorchScript and pt2."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from converter.model import TorchModel


@dataclass(frozen=True, slots=True)
class Traced:
    """One of them: its file in an artifact, what people call it, and what is done to write it.

    The format's name is the profile's. Whatever writes it leaves the module as it was, and gives the same bytes again.
    """

    format: Literal["torchscript", "pt2"]
    file: str
    title: str
    doing: str

    def write(self, model: TorchModel, path: Path, *, strictly: bool = False) -> None:
        """Write ``model`` in bf16 to ``path``; :class:`~bf16kit.errors.ConversionError` where torch cannot.

        ``strictly`` refuses what a trace would keep of its example alone: no graph of it was made, which would not.
        """
        if self.format == "torchscript" and model.script is not None:
            from converter.formats.script import narrow_script

            narrow_script(model.script, path)
        elif self.format == "torchscript":
            from converter.formats.torchscript import narrow_and_trace

            narrow_and_trace(model, path, strictly=strictly)
        else:
            from converter.formats.torchexport import narrow_and_export

            narrow_and_export(model, path)


TRACED: Mapping[str, Traced] = {
    traced.format: traced
    for traced in (
        Traced("torchscript", "model.torchscript.pt", "TorchScript", "tracing TorchScript"),
        Traced("pt2", "model.pt2", "torch.export program", "exporting with torch.export"),
    )
}
