"""What large libraries make is made once in a process. Neither measure changes what a test sees."""

import functools
import gc
import sys


def keep_what_libraries_made() -> None:
    """Set all present objects aside, and let torch's tables of operators be filled once."""
    _collect_only_what_is_new()
    _keep_torchs_tables_of_operators()


def fill_torchs_tables() -> None:
    """Fill the tables now, for the children of this process."""
    registration = sys.modules.get("torch.onnx._internal.exporter._registration")
    if registration is None:
        return
    from bf16kit.converter.process.quiet import quiet
    from bf16kit.converter.read.onnx_export import OPSET

    with quiet():
        registration.ONNXRegistry.from_torchlib(opset_version=OPSET)
        vars(sys.modules["torch._export.utils"])["_collect_all_valid_cia_ops"]()


def _collect_only_what_is_new() -> None:
    """Set all present objects aside: the many collections of a conversion would spend a third of its time on them."""
    gc.collect()  # garbage that is frozen is never freed
    gc.freeze()


def _keep_torchs_tables_of_operators() -> None:
    """Cache the exporter's table of ONNX functions, and torch's operators that export may keep whole.

    Filling them takes 0.4 s and 0.08 s of each export. No test adds to them.
    """
    registration = sys.modules.get("torch.onnx._internal.exporter._registration")
    if registration is None or not isinstance(vars(registration.ONNXRegistry)["from_torchlib"], classmethod):
        return
    kept = staticmethod(functools.cache(registration.ONNXRegistry.from_torchlib))
    registration.ONNXRegistry.from_torchlib = kept
    operators = sys.modules["torch._export.utils"]
    for name in ("_materialize_cpp_cia_ops", "_collect_all_valid_cia_ops_for_namespace"):
        vars(operators)[name] = functools.cache(vars(operators)[name])
