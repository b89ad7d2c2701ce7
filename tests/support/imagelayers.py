"""Finds the files in which two images differ. Digests only show that images differ."""

from __future__ import annotations

import hashlib
import json
import subprocess
import tarfile
from pathlib import Path

_Entries = dict[str, tuple[object, ...]]


def differing(one: str, other: str, directory: Path) -> list[str]:
    """Return the first 20 files of the layers that differ in type, content, mode, owner, time or link, or that only one
    image has."""
    ours, theirs = (_entries(image, directory / f"{number}.tar") for number, image in enumerate((one, other)))
    names = sorted(name for name in {*ours, *theirs} if ours.get(name) != theirs.get(name))
    return [f"{name}: {ours.get(name)} and {theirs.get(name)}" for name in names[:20]]


def _entries(image: str, saved: Path) -> _Entries:
    """Return type, mode, owner, time, link and a digest of every file, by layer and name."""
    subprocess.run(["docker", "save", "--output", str(saved), image], check=True, capture_output=True)
    found: _Entries = {}
    with tarfile.open(saved) as whole:
        (manifest,) = json.loads(_read(whole, "manifest.json"))
        for number, layer in enumerate(manifest["Layers"]):
            held = whole.extractfile(layer)
            assert held is not None
            with tarfile.open(fileobj=held) as layered:
                for member in layered:
                    owner = (member.uid, member.gid)
                    digest = hashlib.sha256(_read(layered, member)).hexdigest()[:12] if member.isfile() else ""
                    noted = (member.type.decode(), oct(member.mode), owner, member.mtime, member.linkname, digest)
                    found[f"layer {number} {member.name}"] = noted
    return found


def _read(archive: tarfile.TarFile, member: str | tarfile.TarInfo) -> bytes:
    held = archive.extractfile(member)
    assert held is not None
    return held.read()
