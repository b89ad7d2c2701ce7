"""Builds the CPU kernel with the installation, where there is a C++17 compiler; everything else is in pyproject.toml.

The kernel is a plain shared library for ONNX Runtime, not a Python extension. Without it everything works, and the
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
    "-ffp-contract=off",  # what is fused says so: every path must round alike
    "-Wno-maybe-uninitialized",  # GCC's own AVX-512 header
    "-Wno-psabi",  # vectors are passed between functions of one file alone
]


class BuildKernel(build_ext):
    """Gives the library its own name, without Python's ABI tag: it is loaded by ONNX Runtime."""

    def get_ext_filename(self, fullname: str) -> str:
        return f"{Path(*fullname.split('.'))}.so"

    def get_export_symbols(self, ext: Extension) -> list[str]:
        return []  # not PyInit_…


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
            # ONNX Runtime lets go of it with the last session, but threads may still hold what it gave them
            extra_link_args=["-Wl,-z,nodelete"] if sys.platform == "linux" else [],
            # a failed build is a warning: the installation goes on without the kernel
            optional=os.environ.get("BF16KIT_REQUIRE_KERNEL") != "1",
        )
    ],
)
