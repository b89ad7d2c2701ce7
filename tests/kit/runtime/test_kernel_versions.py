"""The releases of ONNX Runtime that the kernel is tested with; messages and docs must name the same releases.

``make test-kernel-versions`` installs them and runs the operators' tests with each.
"""

from __future__ import annotations

import re
from pathlib import Path

_ROOT = Path(__file__).resolve().parents[3]


def _text(path: str) -> str:
    return (_ROOT / path).read_text("utf-8")


def _found(pattern: str, path: str) -> str:
    found = re.search(pattern, _text(path))
    assert found is not None, f"{path} has no {pattern}"
    return found[1]


OLDEST = int(_found(r"kVersion = (\d+);", "kernels/ort/abi.h"))
NEWEST = int(_found(r"onnxruntime==1\.(\d+)\.", "constraints.txt"))
TESTED = _found(r"versions=\(([\d. ]+)\)", "kernels/tests/versions.sh").split()


def test_every_minor_release_from_the_oldest_to_the_pinned_one_is_tested_once() -> None:
    assert [int(version.split(".")[1]) for version in TESTED] == list(range(OLDEST, NEWEST + 1))
    assert TESTED[-1] == _found(r"onnxruntime==(\S+)", "constraints.txt")


def test_messages_and_docs_name_the_releases_that_are_tested() -> None:
    required = int(_found(r"onnxruntime>=1\.(\d+)", "pyproject.toml"))
    assert OLDEST <= required <= NEWEST
    said = f"an onnxruntime of 1.{required} to 1.{NEWEST}, which are tested, or a later 1.x"
    assert said in _text("bf16kit/runtime/ort/kernel.py")
    assert said in _text("docs/operations.md")
    assert f"every minor version from 1.{OLDEST} to 1.{NEWEST}" in _text("docs/operations.md")
    assert f"1.{OLDEST} or a later 1.x" in _text("kernels/ort/register.cpp")
