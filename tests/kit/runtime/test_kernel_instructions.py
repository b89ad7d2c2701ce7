"""Each function of the kernel contains only instructions that its code path allows.

The danger is a function in a shared header. If it is compiled within a path, it may contain that path's instructions.
If it is not inlined, the linker keeps one of its copies: other paths, or code outside all paths, may then run that one.
"""

import os
import platform
import shlex
import shutil
from pathlib import Path

import pytest
from disassembled import PATHS, allowed, compiled, instructions, used, weak

from bf16kit.runtime.ort import kernel

_KERNELS = Path(__file__).resolve().parents[3] / "kernels"
_COMPILER = os.environ.get("CXX") or "g++"
pytestmark = [
    pytest.mark.skipif(platform.machine() != "x86_64", reason="the paths are those of x86-64"),
    pytest.mark.skipif(shutil.which("objdump") is None, reason="no objdump (Debian: apt-get install binutils)"),
]
compiler = pytest.mark.skipif(
    shutil.which(shlex.split(_COMPILER)[0]) is None, reason=f"no C++ compiler: {_COMPILER} is not on PATH"
)


@pytest.mark.skipif(not kernel.LIBRARY.exists(), reason="the kernel was not built: no C++17 compiler")
def test_each_function_of_the_library_has_only_instructions_of_its_path() -> None:
    functions = used(kernel.LIBRARY)
    assert {name: sorted(found - allowed(name)) for name, found in functions.items() if found - allowed(name)} == {}
    for path, has in PATHS.items():  # each path has all of its instructions, so the search above can find them
        assert set().union(*(found for name, found in functions.items() if f"::{path}::" in name)) == has


@pytest.mark.skipif(not kernel.LIBRARY.exists(), reason="the kernel was not built: no C++17 compiler")
def test_amx_tiles_are_used_with_the_documented_instructions() -> None:
    """Six tiles hold sums, tile 6 x, tile 7 the weight: VEX.128.F3.0F38.W0 5C, operands where Intel documents them."""
    found = [(code, name, operands) for where, code, name, operands in instructions(kernel.LIBRARY) if "amx::" in where]
    names = {name for _, name, _ in found}
    tiles = {name for name in names if name.startswith(("tile", "tdp", "ldt", "stt"))}
    assert tiles == {"tilezero", "tileloadd", "tilestored", "tdpbf16ps", "ldtilecfg", "sttilecfg", "tilerelease"}
    dots = {(code, operands) for code, name, operands in found if name == "tdpbf16ps"}
    expected = {(f"c4 e2 42 5c {0xC6 + 8 * total:02x}", f"%tmm7,%tmm6,%tmm{total}") for total in range(6)}
    assert dots == expected
    loaded = {operands.rsplit(",", 1)[1] for _, name, operands in found if name == "tileloadd"}
    assert loaded == {"%tmm6", "%tmm7"}


@pytest.mark.long
@compiler
@pytest.mark.parametrize("source", sorted([*_KERNELS.glob("isa/*.cpp"), *_KERNELS.glob("rounding/*.cpp")]), ids=str)
def test_functions_that_objects_share_run_on_any_processor(source: Path, tmp_path: Path) -> None:
    built = compiled(source, tmp_path, _COMPILER, f"-I{_KERNELS}")
    functions, shared = used(built), weak(built)
    assert {name: found for name, found in functions.items() if name in shared and found} == {}
    assert {name: found for name, found in functions.items() if found - allowed(name)} == {}


@compiler
def test_a_shared_function_compiled_within_a_path_is_detected(tmp_path: Path) -> None:
    """This happens if a header is included after the pragma that begins a path's target."""
    source = tmp_path / "wrong.cpp"
    source.write_text(
        '#pragma GCC push_options\n#pragma GCC target("avx512f")\n'
        "inline float twice(float x) { return x + x; }\n"
        "template <class T> T thrice(T x) { return x + x + x; }\n"
        "float use(float x) { return twice(x) + thrice(x); }\n#pragma GCC pop_options\n"
    )
    built = compiled(source, tmp_path, _COMPILER)
    functions = used(built)
    assert {name for name in weak(built) if functions[name]} == {"twice(float)", "float thrice<float>(float)"}
    assert {name for name, found in functions.items() if found - allowed(name)} >= {"use(float)", "twice(float)"}
