"""The package is an independent client: apart from the standard library it imports grpcio, protobuf and numpy only."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import oip_conformance

ALLOWED = tuple(
    f"{name}." for name in ("oip_conformance", "google.protobuf", "grpc", "numpy", *sys.stdlib_module_names)
)


def test_the_package_imports_only_its_three_dependencies() -> None:
    """In functions too. The server under test may be written in Python: none of its code may help to judge it."""
    found = set()
    for file in Path(oip_conformance.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text("utf-8"))):
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                names = [f"{'.' * node.level}{node.module or ''}"]
            else:
                continue
            found |= {(file.name, name) for name in names if not f"{name}.".startswith(ALLOWED)}
    assert not found
