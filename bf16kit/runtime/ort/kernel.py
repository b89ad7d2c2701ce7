"""The CPU kernel as Python sees it: a library beside this file, the path that it runs, and why it may not be used.

The library holds operators of the domain ``bf16kit``: products of fp32 activations and weights that stay bf16 in
memory, summed in fp32 (``MatMul_…``; ``MatMul2_…`` and ``MatMul3_…`` for several weights; ``MatMul`` for graphs made by
hand; ``MatMulBf16_…`` rounds the activations to bf16), attention (``Attention_…``, ``AttentionBf16_…``), normalisation
(``AddLayerNorm…``, ``…RmsNorm…``), convolutions (``Conv…``), recurrences (``LSTM…``, ``GRU…``), and ``Gather_…``, which
looks up rows in a bf16 weight. A graph also defines them as functions of standard operators, which ONNX Runtime runs if
the library is not registered: the same results within fp32 rounding, from weights widened at load. A recurrence that
rounds activations does not round its state then.
"""

from __future__ import annotations

import ctypes
import os
from dataclasses import dataclass
from pathlib import Path

from bf16kit.messages.errors import ConfigError

DOMAIN = "bf16kit"
LIBRARY = Path(__file__).parents[1] / "_bf16kernel.so"
VARIABLE = "BF16KIT_KERNEL_PATH"
# as kernels/gemm/choose.cpp names them, fastest first; those for x86-64, then those for 64-bit Arm
PATHS = ("amx", "avx512_bf16", "avx512f", "avx2", "neon_bf16", "neon", "portable")
BF16 = "Bf16"  # in the names of operators that round their activations to bf16
OFF = "off"

_COST = "bf16 weights are widened to fp32 at load, which takes twice the memory and is slower for a few rows at a time"
_ONNXRUNTIME = "an onnxruntime of 1.24 to 1.31, which are tested, or a later 1.x"
_TILES = "the processor's tiles (AMX) are not used, because"
_SLOWER = "bf16 products take longer from four rows on, with results of the same accuracy"
_NOT_BUILT = (
    "it was not built when bf16kit was installed: there was no C++17 compiler, or it failed (pip install -v shows why),"
    " or the wheel is the one without it"
)
_IN_A_CHECKOUT = "run `make setup` there, with a C++17 compiler, or start Python elsewhere to import what is installed"
_REINSTALL = "install a C++17 compiler (on Debian: apt-get install g++) and install bf16kit again from its sources"


@dataclass(frozen=True, slots=True)
class Kernel:
    """The kernel path that runs a graph; without one, or without tiles that the processor has, the reason."""

    path: str = ""  # one of PATHS, "" = do not register the library
    note: str = ""  # one sentence: why the kernel, or the processor's tiles, are not used
    advice: str = ""  # the cost of that, and the remedy
    operators: tuple[str, ...] = ()  # those that the graph uses

    @property
    def library(self) -> Path | None:
        """The library that a session must register, if any."""
        return LIBRARY if self.path else None


NOT_NEEDED = Kernel()


def usable_kernel(*, rounds: bool = False) -> Kernel:
    """Return the kernel on this machine, from the environment as it is now.

    Raises :class:`ConfigError` as :func:`configured_kernel` does.
    """
    kernel = configured_kernel(rounds=rounds)
    if kernel.path:
        from bf16kit.runtime.ort.session import ort

        try:  # the library checks the runtime's version and the result of a first call to it
            ort.SessionOptions().register_custom_ops_library(str(LIBRARY))
        except Exception as error:  # noqa: BLE001 - ONNX Runtime's exceptions share no other base
            return _no_kernel(f"this ONNX Runtime and its library do not fit ({error})", f"install {_ONNXRUNTIME}")
    return kernel


def multiplies_bf16() -> bool:
    """Return whether this machine has a path of its own, with bf16 instructions, for products that round activations.

    Other paths emulate such products, which then take as long as fp32 products, or longer.
    """
    path = usable_kernel(rounds=True).path
    return bool(path) and path != usable_kernel().path


def configured_kernel(*, rounds: bool = False) -> Kernel:
    """Return what :func:`usable_kernel` returns unless ONNX Runtime refuses the library; does not import ONNX Runtime.

    ``rounds``: the path for products that round their activations to bf16. ``amx``, ``avx512_bf16`` and ``neon_bf16``
    are only for those; for others they mean ``avx512f`` and ``neon``. ``amx`` is left out, with a note, if the
    processor's tiles fail the library's self-check or the system forbids them.

    Raises :class:`ConfigError` when ``BF16KIT_KERNEL_PATH`` names an unknown path, or one that this processor cannot
    run. A user who names a path does not want another one silently.
    """
    configured = os.environ.get(VARIABLE, "")
    if configured and configured not in (*PATHS, OFF):
        raise ConfigError(
            f"{VARIABLE} is {configured!r}; allowed are {', '.join(PATHS)} and {OFF}; unset it for the"
            " fastest path that this processor runs"
        )
    if configured == OFF:
        return _no_kernel(f"it is switched off by {VARIABLE}={OFF}", f"unset {VARIABLE} to use it")
    if not LIBRARY.exists():
        if (LIBRARY.parents[2] / "setup.py").exists():  # not what is installed is imported there
            return _no_kernel("it was not built in the checkout that bf16kit is imported from", _IN_A_CHECKOUT)
        return _no_kernel(_NOT_BUILT, _REINSTALL)
    try:
        library = ctypes.CDLL(str(LIBRARY))
        path_function = library.bf16kit_kernel_path_bf16 if rounds else library.bf16kit_kernel_path
        tiles_off = library.bf16kit_kernel_tiles_off
    except (OSError, AttributeError) as error:  # built for another machine, damaged, or another library
        return _no_kernel(f"its library cannot be loaded ({error})", _REINSTALL)
    path_function.restype = tiles_off.restype = ctypes.c_char_p
    path: bytes | None = path_function()
    if path is None:
        raise ConfigError(
            f"{VARIABLE} is {configured!r}, which this processor cannot run; name another of {', '.join(PATHS)}, or"
            " unset it for the fastest path that it runs"
        )
    # Only a path that was chosen for want of tiles: to ask about them asks the system for them.
    reason: bytes | None = tiles_off() if rounds and not configured else None
    if reason is not None:
        advice = f"{_SLOWER}; {VARIABLE}={path.decode()} stops this message"
        return Kernel(path.decode(), f"{_TILES} {reason.decode()}", advice)
    return Kernel(path.decode())


def _no_kernel(reason: str, remedy: str) -> Kernel:
    return Kernel("", f"no CPU kernel, because {reason}", f"{_COST}; {remedy}")
