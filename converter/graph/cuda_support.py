"""Which operators have bf16 kernels on a provider that is not installed here: one table per ONNX Runtime version."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources

from bf16kit.errors import UsageError
from bf16kit.versions import order
from converter.process import versions

_FILE = re.compile(r"cuda_kernels_(\d+(?:\.\d+)*)\.json")


@dataclass(frozen=True, slots=True)
class KernelTable:
    """First operator version with a bf16 kernel in ONNX Runtime's CUDA provider, by (domain, operator).

    ``newest_opset`` is the newest opset the table was read for; ``accepted_opset`` and ``accepted_ir`` are the newest
    that this ONNX Runtime loads at all.
    """

    onnxruntime: str
    newest_opset: int
    accepted_opset: int
    accepted_ir: int
    first: Mapping[tuple[str, str], int]

    @classmethod
    def load(cls, version: str | None = None) -> KernelTable:
        """The table for ONNX Runtime ``version``; for None that of the installed one, or the newest where it has none.

        UsageError when there is no table for ``version``.
        """
        tables = {m[1]: e for e in resources.files("converter.graph.data").iterdir() if (m := _FILE.fullmatch(e.name))}
        installed = versions.onnxruntime()
        chosen = version or (installed if installed in tables else max(tables, key=order))
        if chosen not in tables:
            raise UsageError(f"no CUDA kernel table for ONNX Runtime {chosen}; there are {', '.join(sorted(tables))}")
        data = json.loads(tables[chosen].read_text(encoding="utf-8"))
        first = {(domain, op): v for domain, ops in data["kernels"].items() for op, v in ops.items()}
        accepts = data["accepts"]
        return cls(data["onnxruntime"], data["newest_opset"], accepts["opset"], accepts["ir"], first)

    def has(self, domain: str, op: str, since: int) -> bool:
        """Whether version ``since`` of the operator has a bf16 kernel."""
        first = self.first.get((domain, op))
        if first is None:
            return False
        return first <= since and (domain != "" or since <= self.newest_opset)


def stand_in() -> str | None:
    """A sentence when the kernels of another ONNX Runtime than the installed one were looked up; None when not."""
    table, installed = KernelTable.load().onnxruntime, versions.onnxruntime()
    if installed in (None, table):
        return None
    return (
        f"which bf16 kernels CUDA has was read for ONNX Runtime {table}, and {installed} is installed, for which there"
        f" is no table: serve the cuda profile with {table} or newer"
    )
