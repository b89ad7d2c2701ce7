"""``python -m bench.gpu.predicted [WORKSPACE]``: write the tables of predictions in docs/gpu.md."""

from __future__ import annotations

import re
import sys
import tempfile
from pathlib import Path

from bench.core.workspace import Workspace
from bench.gpu.devices import DEVICES
from bench.gpu.roofline import Model

PAGE = Path(__file__).parents[2] / "docs" / "gpu.md"
BATCHES = (1, 8, 64, 256)
TOKENS = 128
_BEGIN, _END = "<!-- predicted: written by python -m bench.gpu.predicted -->\n", "<!-- end of predicted -->"


def tables(workspace: Workspace) -> str:
    """A table for each model, of artifacts that are made in ``workspace`` when they are not there."""
    parts = [
        table(f"MiniLM, {TOKENS} tokens", workspace.minilm(), {"seq": TOKENS}),
        table("MLP 1024-4096-4096-1024", workspace.torch_mlp(), {}),
    ]
    return "\n".join(parts)


def table(title: str, artifact: Path, dims: dict[str, int]) -> str:
    """A row for each device and batch size."""
    head = "batch | bf16 at least, ms | bf16 node by node, ms | TF32 ÷ bf16 | fp32 ÷ bf16 | fp32 ÷ bf16 at least"
    lines = [f"| {title} | {head} |", "|---|---|---|---|---|---|---|"]
    models = {batch: Model.of(artifact, {**dims, "batch": batch}) for batch in BATCHES}
    for device in DEVICES.values():
        for batch, model in models.items():
            on = model.on(device)
            narrow, tf32, fp32 = on["bf16"], on["tf32"], on["fp32"]
            lines.append(
                f"| {device.name} | {batch} | {narrow.least * 1e3:.3g} | {narrow.by_node * 1e3:.3g}"
                f" | {tf32.by_node / narrow.by_node:.2f} | {fp32.by_node / narrow.by_node:.2f}"
                f" | {fp32.least / narrow.least:.2f} |"
            )
    return "\n".join(lines) + "\n"


def shown() -> str:
    """What the page has."""
    (found,) = re.findall(f"{re.escape(_BEGIN)}(.*?){re.escape(_END)}", PAGE.read_text("utf-8"), re.DOTALL)
    return str(found)


def main() -> None:
    """Put the tables where the page has the old ones."""
    with tempfile.TemporaryDirectory(prefix="bf16kit-predicted-") as scratch:
        made = tables(Workspace(Path(sys.argv[1] if len(sys.argv) > 1 else scratch)))
    page, old = PAGE.read_text("utf-8"), shown()
    PAGE.write_text(page.replace(_BEGIN + old + _END, _BEGIN + made + _END), "utf-8")


if __name__ == "__main__":
    main()
