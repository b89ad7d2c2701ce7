"""Writes an image's contents as a CycloneDX document: ``python bill.py IMAGE VERSION FILE``, in a build stage.

The stage has the image's base, and its environment at the same path. So cyclonedx-py lists the Python packages in
/opt/bf16kit, and dpkg the Debian ones. The document must pass CycloneDX's schema, or the build fails. The same image
gives the same bytes: no serial number, no clock time.
"""

from __future__ import annotations

import json
import platform
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any
from urllib.parse import quote

SPECIFICATION = "1.6"
ENVIRONMENT = Path("/opt/bf16kit/bin/python")
_DPKG = ["dpkg-query", "--show", "--showformat", "${Package}\t${Version}\t${Architecture}\t${db:Status-Abbrev}\n"]

Component = dict[str, Any]


def debian(listing: str, release: str) -> list[Component]:
    """Return the installed packages of ``listing``, whose lines are name, version, architecture and status.

    ``release`` is ID and version from /etc/os-release: debian-12.
    """
    found = []
    for line in listing.splitlines():
        name, version, architecture, status = line.split("\t")
        if status[:2] != "ii":
            continue
        purl = (
            f"pkg:deb/{release.partition('-')[0]}/{name}@{quote(version, safe='')}?arch={architecture}&distro={release}"
        )
        found.append({"type": "library", "name": name, "version": version, "bom-ref": purl, "purl": purl})
    return found


def interpreter(version: str) -> Component:
    """Return Python itself, which is not a Debian package in the official images."""
    purl = f"pkg:generic/python@{version}"
    return {"type": "application", "name": "python", "version": version, "bom-ref": purl, "purl": purl}


def bill_of_materials(found: Component, others: Iterable[Component], image: str, version: str) -> Component:
    """Return ``found``, a document of the Python packages, as one of ``image`` that also contains the ``others``."""
    components = sorted([*found["components"], *others], key=lambda component: str(component["bom-ref"]))
    image_component = {"type": "container", "name": image, "version": version, "bom-ref": f"{image}@{version}"}
    contents = {"ref": image_component["bom-ref"], "dependsOn": [component["bom-ref"] for component in components]}
    dependencies = [contents, *found.get("dependencies", [])]
    return found | {
        "metadata": found.get("metadata", {}) | {"component": image_component},
        "components": components,
        "dependencies": sorted(dependencies, key=lambda dependency: str(dependency["ref"])),
    }


def _python_packages() -> Component:
    command = [sys.executable, "-m", "cyclonedx_py", "environment", str(ENVIRONMENT)]
    command += ["--output-reproducible", "--spec-version", SPECIFICATION, "--output-format", "JSON"]
    document: Component = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)
    return document


def _release() -> str:
    pairs = (line.partition("=") for line in Path("/etc/os-release").read_text("utf-8").splitlines())
    known = {key: value.strip('"') for key, _, value in pairs}
    return f"{known['ID']}-{known['VERSION_ID']}"


def _check(text: str) -> None:
    from cyclonedx.schema import SchemaVersion
    from cyclonedx.validation.json import JsonStrictValidator

    wrong = JsonStrictValidator(SchemaVersion.from_version(SPECIFICATION)).validate_str(text)
    if wrong is not None:
        sys.exit(f"bill.py: not CycloneDX {SPECIFICATION}: {wrong}")


def main(image: str, version: str, target: Path) -> None:
    """Write the bill of materials of ``image`` to ``target``."""
    listing = subprocess.run(_DPKG, check=True, stdout=subprocess.PIPE, text=True).stdout
    others = [*debian(listing, _release()), interpreter(platform.python_version())]
    text = json.dumps(bill_of_materials(_python_packages(), others, image, version), indent=1, sort_keys=True) + "\n"
    _check(text)
    target.write_text(text, "utf-8")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]))
