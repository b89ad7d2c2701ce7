"""Libraries of the names that a release wants of CUDA: some functions work on the host's memory, all others answer 0.

The provider is loaded and made with them. It registers its kernels before it does anything with a device, and a session
is made, its graph optimised and its nodes given to providers before anything runs.
"""

from __future__ import annotations

import re
import subprocess
from collections import defaultdict
from pathlib import Path

_NEEDED = re.compile(r"\(NEEDED\)\s+Shared library: \[(lib(?:cu|nv)[^\]]+)\]")
_PROVIDER = Path(__file__).with_name("provider.cpp")
_CUDA = Path(__file__).with_name("cuda.c")


def stand_in(capi: Path, into: Path) -> None:
    """Make them for the release whose libraries are in ``capi``: CUDA's into ``into``, TensorRT's beside the others."""
    into.mkdir(exist_ok=True)
    provider = capi / "libonnxruntime_providers_cuda.so"
    needed = _NEEDED.findall(_run("readelf", "-d", provider))
    symbols = _symbols_by_version(provider)
    working = into / "cuda.o"
    _run("gcc", "-c", "-fPIC", "-o", working, _CUDA)
    own_symbols = {line.split()[-1] for line in _run("nm", "--defined-only", "-g", working).splitlines()}
    # What has no version is anybody's: the first library has it.
    loose = {name for version, names in symbols.items() if version not in needed for name in names}
    for index, library in enumerate(needed):
        names = symbols.get(library, set()) | (loose if index == 0 else set())
        source, script = into / "names.c", into / "names.map"
        source.write_text("".join(f"long {name}(void) {{ return 0; }}\n" for name in sorted(names - own_symbols)))
        exported = "".join(f" {name};" for name in sorted(names))
        script.write_text(f"{library} {{ {f'global:{exported}' if exported else ''} local: *; }};\n")
        flags = (f"-Wl,-soname,{library}", f"-Wl,--version-script={script}")
        _run("gcc", "-shared", "-fPIC", "-o", into / library, source, working, *flags)
    _run("g++", "-O1", "-shared", "-fPIC", "-o", capi / "libonnxruntime_providers_tensorrt.so", _PROVIDER, "-ldl")


def _symbols_by_version(provider: Path) -> dict[str, set[str]]:
    """The names that are NVIDIA's, by the version that they are wanted in."""
    symbols: dict[str, set[str]] = defaultdict(set)
    for line in _run("nm", "-D", "--undefined-only", provider).splitlines():
        name, _, version = line.split()[-1].partition("@")
        if re.match(r"_*(cu|nv)", name):
            symbols[version.lstrip("@")].add(name)
    return symbols


def _run(*command: str | Path) -> str:
    return subprocess.run([*map(str, command)], capture_output=True, text=True, check=True).stdout
