"""Build the CPU kernel into the package if there is a C++17 compiler; all other settings are in pyproject.toml.

The kernel is a plain shared library for ONNX Runtime, not a Python extension: one wheel fits every Python. Without it
everything works, but the ``cpu`` profile runs on ONNX Runtime's own fp32 kernels, and the wheel fits every platform.
``BF16KIT_BUILD_KERNEL=1`` makes a failed build an error, and ``0`` leaves the kernel out.
"""

from __future__ import annotations

import os
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext
from setuptools.command.build_py import build_py
from setuptools.modified import newer_group

_NAME = "_bf16kernel.so"
_WANTED = os.environ.get("BF16KIT_BUILD_KERNEL", "")
_FOLDERS = ("ort", "gemm", "isa", "rounding")
_FLAGS = [
    *("-std=c++17", "-O3", "-g0", "-fPIC", "-fvisibility=hidden", "-Wall", "-Wextra"),
    "-ffp-contract=off",  # only explicit fma is fused: every path must round alike
    "-Wno-maybe-uninitialized",  # GCC's own AVX-512 header causes this warning
    "-Wno-psabi",  # harmless: vectors are only passed between functions of one file
]
_KERNEL = Extension(
    "bf16kit.runtime._bf16kernel",
    sources=[str(path) for folder in _FOLDERS for path in sorted(Path("kernels", folder).glob("*.cpp"))],
    depends=[str(path) for folder in _FOLDERS for path in sorted(Path("kernels", folder).glob("*.[hi]*"))],
    include_dirs=["kernels"],
    language="c++",
    extra_compile_args=_FLAGS,
    # ONNX Runtime unloads the library with the last session, but threads may still use its thread-local memory
    extra_link_args=["-Wl,-z,nodelete"] if sys.platform == "linux" else [],
    # by default a failed build is only a warning, and the installation continues without the kernel
    optional=_WANTED != "1",
)


class BuildPython(build_py):
    """Removes what an earlier build left: otherwise a wheel would hold modules that the sources no longer have."""

    def run(self) -> None:
        for path in Path(self.build_lib).rglob("*"):
            if path.is_file() and not (path.name == _NAME and self.distribution.has_ext_modules()):
                path.unlink()
        super().run()


class BuildKernel(build_ext):
    """Compiles the files side by side. Names the library without Python's ABI tag, because ONNX Runtime loads it."""

    def build_extension(self, ext: Extension) -> None:
        target = Path(self.get_ext_fullpath(ext.name))
        if not self.force and not newer_group([*ext.sources, *ext.depends], str(target)):
            return
        target.unlink(missing_ok=True)  # if the build fails, nothing of older sources stays
        options = {"output_dir": self.build_temp, "include_dirs": ext.include_dirs}
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            made = [
                pool.submit(self.compiler.compile, [source], extra_postargs=ext.extra_compile_args, **options)
                for source in sorted(ext.sources)
            ]
            ext.extra_objects = [name for each in made for name in each.result()]
        ext.sources, self.force = [], True  # only to be linked, in any case
        super().build_extension(ext)

    def copy_extensions_to_source(self) -> None:
        for ext in self.extensions:
            old = Path(self.get_ext_fullpath(ext.name))
            if old.exists() and not Path(self.build_lib, self.get_ext_filename(ext.name)).exists():
                old.unlink()
                self.warn(f"{old} is removed: it was built of other sources")
        super().copy_extensions_to_source()

    def get_ext_filename(self, fullname: str) -> str:
        return f"{Path(*fullname.split('.'))}.so"

    def get_export_symbols(self, ext: Extension) -> list[str]:
        return []  # no PyInit_…: this is not a Python module


class KernelWheel(bdist_wheel):
    """Tags the wheel for every Python, and for every platform if it holds no kernel."""

    def run(self) -> None:
        self.run_command("build")
        self.root_is_pure = not any(Path(self.get_finalized_command("build").build_lib).rglob(_NAME))
        super().run()

    def get_tag(self) -> tuple[str, str, str]:
        return "py3", "none", super().get_tag()[2]


setup(
    cmdclass={"build_py": BuildPython, "build_ext": BuildKernel, "bdist_wheel": KernelWheel},
    ext_modules=[] if _WANTED == "0" else [_KERNEL],
)
