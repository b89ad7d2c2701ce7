"""Writes the bf16 torch.export program: exported with bf16 weights and activations inside, float32 at its edges.

Its casts are operators of the program, so that it needs no autocast at run time and runs on any device.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from bf16kit.messages.errors import ConversionError
from converter.process.quiet import quiet, reason
from converter.source import TorchModel

_MODEL = "models/model.json"
_SAMPLES = "data/sample_inputs/model.pt"
# Records that the writer makes itself.
_WRITERS_OWN = ("version", "byteorder", ".data/", ".format_version", ".storage_alignment")


def narrow_and_export(model: TorchModel, path: Path) -> None:
    """Write ``model`` in bf16 to ``path`` as a torch.export archive; the same model gives the same bytes.

    The module is restored afterwards. Raises :class:`ConversionError` if torch cannot export it, or if it changes its
    own buffers, which several requests would do at once, or its inputs.
    """
    import torch

    from converter.write.torchscript import Edges, narrowed

    raw = path.with_name(f"{path.name}.raw.pt2")
    try:
        with quiet(), torch.no_grad(), narrowed(model.module, path.parent) as module:
            exported = torch.export.export(
                Edges(module).eval(), model.example, dynamic_shapes=_dynamic_shapes(model), strict=False
            )
            # Autocast becomes explicit casts, and in-place operators become ones that are not in place.
            program = exported.run_decompositions({})
            signature = program.graph_signature
            for changed in (*signature.buffers_to_mutate.values(), *signature.user_inputs_to_mutate.values()):
                raise ConversionError(f"it changes its own buffer or input {changed.removeprefix('module.module.')!r}")
            torch.export.save(program, raw)
    except Exception as error:  # exporting runs the user's model, which may raise anything
        raw.unlink(missing_ok=True)
        raise ConversionError(f"torch cannot export the model in bf16: {reason(error)}") from error
    try:
        _rewrite(raw, path)
    finally:
        raw.unlink()


def _dynamic_shapes(model: TorchModel) -> Any:
    import torch

    shapes = tuple(
        {axis: torch.export.Dim.DYNAMIC for axis, dim in enumerate(spec.shape) if isinstance(dim, str)}
        for spec in model.inputs
    )
    return (shapes,) if any(shapes) else None


def _rewrite(raw: Path, path: Path) -> None:
    """Copy the archive ``raw`` to ``path`` without sample inputs, guards and metadata with this machine's paths."""
    import torch

    reader = torch._C.PyTorchFileReader(str(raw))
    # A stream, not a path: given a path, the writer puts the path's stem into the archive.
    with path.open("xb") as file:
        writer = torch._C.PyTorchFileWriter(file)
        for name in sorted(reader.get_all_records()):
            if name.startswith(_WRITERS_OWN):
                continue
            record = b"" if name == _SAMPLES else reader.get_record(name)
            if name == _MODEL:
                record = _plain(json.loads(record))
            writer.write_record(name, record, len(record))
        writer.write_end_of_file()


def _plain(program: dict[str, Any]) -> bytes:
    """Return the JSON of ``program``, the same every time."""
    module = program["graph_module"]
    for node in module["graph"]["nodes"]:
        node["metadata"] = {}
    return json.dumps(program | {"guards_code": []}, sort_keys=True, separators=(",", ":")).encode()
