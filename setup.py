"""Build the CPU kernel during installation if there is a C++17 compiler; all other settings are in pyproject.toml.

The kernel is a plain shared library for ONNX Runtime, not a Python extension. Without it everything works, but the
``cpu`` profile runs on ONNX Runtime's own fp32 kernels. ``BF16KIT_REQUIRE_KERNEL=1`` makes a failed build an error.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

_FOLDERS = ("ort", "gemm", "isa", "rounding")
_FLAGS = [
    *("-std=c++17", "-O3", "-fPIC", "-fvisibility=hidden", "-Wall", "-Wextra"),
    "-ffp-contract=off",  # only explicit fma is fused: every path must round alike
    "-Wno-maybe-uninitialized",  # GCC's own AVX-512 header causes this warning
    "-Wno-psabi",  # harmless: vectors are only passed between functions of one file
]


class BuildKernel(build_ext):
    """Names the library without Python's ABI tag, because ONNX Runtime loads it, not Python."""

    def get_ext_filename(self, fullname: str) -> str:
        return f"{Path(*fullname.split('.'))}.so"

    def get_export_symbols(self, ext: Extension) -> list[str]:
        return []  # no PyInit_…: this is not a Python module


setup(
    cmdclass={"build_ext": BuildKernel},
    ext_modules=[
        Extension(
            "bf16kit.runtime._bf16kernel",
            sources=[str(path) for folder in _FOLDERS for path in sorted(Path("kernels", folder).glob("*.cpp"))],
            depends=[str(path) for path in sorted(Path("kernels").glob("*/*.[hi]*"))],
            include_dirs=["kernels"],
            language="c++",
            extra_compile_args=_FLAGS,
            # ONNX Runtime unloads the library with the last session, but threads may still use its thread-local memory
            extra_link_args=["-Wl,-z,nodelete"] if sys.platform == "linux" else [],
            # by default a failed build is only a warning, and the installation continues without the kernel
            optional=os.environ.get("BF16KIT_REQUIRE_KERNEL") != "1",
        )
    ],
)
