"""Prepares an installed environment as a layer of an image: small, quick to start, and reproducible.

The Dockerfile's build stages run ``python finish.py ENVIRONMENT [--under ROOT]``. ENVIRONMENT is its path in the image;
during the build it is below ROOT. Files that a server never reads are removed, the other modules are compiled, and
every time stamp is set.

Compiled files are in ``ENVIRONMENT/bytecode`` (in the image ``PYTHONPYCACHEPREFIX`` points there), also those of the
standard library: the official images contain none, and would compile every imported module at each start. Bytecode of
sources in our layer is not checked against them. Bytecode of the base's sources is checked by their hash, because an
update may replace them.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import py_compile
import shutil
import sysconfig
import time
from collections.abc import Iterator
from pathlib import Path

BYTECODE = "bytecode"
# Directories and files that only the packages' builders and testers need. Licences, in *.dist-info, stay.
_TESTED = ("google", "mpmath", "numpy", "onnx", "sympy")  # packages whose directories called `tests` are removed
_DIRECTORIES = (
    "onnx/backend/test",
    "onnx/test",
    "onnxruntime/quantization",
    "onnxruntime/tools",
    "onnxruntime/transformers",
    "numpy/_core/include",
    "torch/include",
    "torch/share",
)
_SUFFIXES = frozenset({".a", ".c", ".cc", ".cpp", ".h", ".hpp", ".pxd", ".pyx"})
# Of the standard library: modules that no server imports, or that are not meant to be compiled.
_LEFT_OUT = frozenset(
    {"dist-packages", "ensurepip", "idlelib", "lib2to3", "site-packages", "test", "tests", "tkinter", "turtledemo"}
)


def prune(packages: Path) -> int:
    """Remove what only tests and compilers read from ``packages``, a site-packages.

    Returns the number of bytes removed.
    """
    unwanted = [packages / name for name in _DIRECTORIES]
    unwanted += [found for name in _TESTED for found in sorted((packages / name).rglob("tests"))]
    unwanted += [found for found in sorted(packages.rglob("*")) if found.suffix in _SUFFIXES and found.is_file()]
    unwanted += sorted(packages.rglob("__pycache__"))
    removed = 0
    for path in unwanted:
        if path.is_dir():
            removed += sum(file.lstat().st_size for file in path.rglob("*") if not file.is_dir())
            shutil.rmtree(path)
        elif path.exists():  # not yet removed with its directory
            removed += path.lstat().st_size
            path.unlink()
    return removed


def compile_tree(sources: Iterator[Path], root: Path, bytecode: Path, mode: py_compile.PycInvalidationMode) -> int:
    """Compile ``sources``, files under ``root`` (/ in the image), to where the image looks for bytecode.

    Returns how many were compiled. A file that is not valid Python of this version, such as a template, is skipped,
    because it is not imported either.
    """
    count = 0
    for source in sorted(sources):
        image_path = Path("/") / source.relative_to(root)
        name = Path(importlib.util.cache_from_source(str(image_path))).name
        target = bytecode / image_path.parent.relative_to("/") / name
        try:
            py_compile.compile(str(source), str(target), str(image_path), doraise=True, invalidation_mode=mode)
        except (py_compile.PyCompileError, ValueError):
            continue
        count += 1
    return count


def set_timestamps(tree: Path, epoch: int) -> None:
    """Set every time stamp in ``tree``, including its own, to ``epoch``, seconds since 1970."""
    for directory, _, files in os.walk(tree, topdown=False):
        for name in (*files, ""):
            os.utime(Path(directory, name), (epoch, epoch), follow_symlinks=False)
        for entry in os.scandir(directory):
            if entry.is_symlink():
                os.utime(entry.path, (epoch, epoch), follow_symlinks=False)


def _python(tree: Path) -> Iterator[Path]:
    return (path for path in tree.rglob("*.py") if path.is_file())


def _standard_library() -> Iterator[Path]:
    library = Path(sysconfig.get_path("stdlib"))
    return (path for path in _python(library) if not _LEFT_OUT & set(path.relative_to(library).parts))


def main() -> None:
    """Prepare the environment that the arguments name."""
    parser = argparse.ArgumentParser(description="Prepares an installed environment as a layer of an image.")
    parser.add_argument("environment", type=Path)
    parser.add_argument("--under", type=Path, default=Path("/"), metavar="ROOT")
    parser.add_argument("--standard-library", action="store_true", help="compile Python's own modules, too")
    parser.add_argument("--uncompiled", action="append", default=[], metavar="PACKAGE", help="a package never imported")
    chosen = parser.parse_args()
    tree = chosen.under / chosen.environment.relative_to("/")
    epoch, started = int(os.environ["SOURCE_DATE_EPOCH"]), time.monotonic()
    removed = sum(prune(packages) for packages in sorted(tree.glob("lib/python3*/site-packages")))
    modes = py_compile.PycInvalidationMode
    own = (path for path in _python(tree / "lib") if not set(chosen.uncompiled) & set(path.parts))
    count = compile_tree(own, chosen.under, tree / BYTECODE, modes.UNCHECKED_HASH)
    if chosen.standard_library:
        count += compile_tree(_standard_library(), Path("/"), tree / BYTECODE, modes.CHECKED_HASH)
    set_timestamps(chosen.under if chosen.under != Path("/") else tree, epoch)
    print(f"{tree}: {removed / 1e6:.0f} MB removed, {count} modules compiled, {time.monotonic() - started:.0f} s")


if __name__ == "__main__":
    main()
