"""Running an ONNX graph with ONNX Runtime, on the CPU or on CUDA."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bf16kit.messages.errors import InputRefused, RuntimeFailure
from bf16kit.messages.wording import brief
from bf16kit.numerics.tensors import TensorSpec
from bf16kit.runtime import CPU, Array, RuntimeInfo, canonical
from bf16kit.runtime.ort.emptytensors import EmptyTensors
from bf16kit.runtime.ort.kernel import NOT_NEEDED
from bf16kit.runtime.ort.onnxgraph import kernel_for, parsed
from bf16kit.runtime.ort.session import Session, open_session, run_options_with_timeout, run_with_values
from bf16kit.runtime.probe import probe_onnx

if TYPE_CHECKING:
    from onnx import ModelProto


class OnnxRuntime:
    """One ONNX graph, loaded: a :class:`bf16kit.runtime.Runtime`.

    ``profile`` and ``precision`` are reported in :class:`RuntimeInfo`; the accumulation is probed on ``device``, with
    the CPU kernel if the graph uses it; ``graph`` is the graph if it has been parsed already. For the other ``options``
    and the errors see :func:`bf16kit.runtime.ort.session.open_session`. Also raises :class:`ConfigError` when the
    environment asks for a kernel path that cannot be used, and :class:`RuntimeFailure` unless ``inputs`` and
    ``outputs`` have the graph's names and dtypes; runs check the shapes.
    """

    def __init__(
        self,
        model: Path | bytes,
        inputs: Sequence[TensorSpec],
        outputs: Sequence[TensorSpec],
        *,
        device: str = CPU,
        profile: str = "cpu",
        precision: str = "bf16-weights",
        note: str = "",
        graph: ModelProto | None = None,
        **options: Any,
    ) -> None:
        device = canonical(device)
        # Only if the graph has nodes of the kernel: the reference must run on ONNX Runtime alone.
        if graph is None:
            graph = parsed(model)
        kernel = kernel_for(graph) if device == CPU else NOT_NEEDED
        self._empty_tensors = EmptyTensors(graph, kernel)
        del graph  # its weights, if they are in it, need not be in memory twice
        session = open_session(model, device=device, library=kernel.library, operators=kernel.operators, **options)
        self.inputs, self.outputs = tuple(inputs), tuple(outputs)
        name = options.get("name") or (model.name if isinstance(model, Path) else "the graph")
        for specs, edges in ((self.inputs, session.get_inputs()), (self.outputs, session.get_outputs())):
            declared = sorted(f"{spec.name} tensor({_ONNX_TYPES.get(spec.dtype, spec.dtype)})" for spec in specs)
            if declared != (real := sorted(f"{edge.name} {edge.type}" for edge in edges)):
                what = f"declared are {', '.join(declared) or 'none'}, the graph has {', '.join(real) or 'none'}"
                raise RuntimeFailure(f"{name}: {what}; convert the checkpoint again")
        self._output_names = [spec.name for spec in outputs]
        self._has_bf16_edges = any(spec.dtype == "bfloat16" for spec in (*inputs, *outputs))
        accumulation = probe_onnx(device, precision, kernel.library)
        note = note or kernel.note
        self.info = RuntimeInfo(
            "onnxruntime", device, profile, precision, accumulation, note, kernel.path, kernel.advice
        )
        self._session: Session | None = session

    def run(
        self, feeds: Mapping[str, Array], outputs: Sequence[str] | None = None, *, seconds: float | None = None
    ) -> dict[str, Array]:
        """See :meth:`bf16kit.runtime.Runtime.run`. ONNX Runtime reads the arrays in place and releases the GIL."""
        session = self._session
        if session is None:
            raise RuntimeFailure("the model is closed")
        sizes = self._empty_tensors.check(feeds)
        names = self._output_names if outputs is None else list(outputs)
        if seconds is None:
            found = self._run(session, names, feeds)
        else:
            with run_options_with_timeout(seconds) as options:
                found = self._run(session, names, feeds, options, seconds)
        if sizes:
            self._empty_tensors.ran(sizes)
        return found

    def _run(
        self, session: Session, names: list[str], feeds: Mapping[str, Array], options: Any = None, seconds: float = 0
    ) -> dict[str, Array]:
        try:
            # run() costs 1 us more than the C++ object behind it; run_with_iobinding and OrtValues cost more than that.
            if self._has_bf16_edges:
                values = run_with_values(session, names, feeds, options)
            else:
                values = session.run(names, feeds, options)
        except Exception as error:  # ONNX Runtime's exceptions share no other base
            if options is not None and options.terminate:
                raise RuntimeFailure(f"ONNX Runtime was not done after {seconds:g} s, and was stopped") from error
            raise _failure(error) from error
        return dict(zip(names, values, strict=True))

    def close(self) -> None:
        """Drop the session; its weights are freed when the active runs have ended. Later calls of ``run`` fail."""
        self._session = None


# ONNX Runtime's messages when an input's values or sizes do not fit the graph. Its own class for that (InvalidArgument)
# is not enough: sizes that cannot be broadcast together raise RuntimeException.
_BLAMES_INPUT = re.compile(
    r"out of (data )?bounds|out of range|broadcast|reshape|dimension|1 or more inputs", re.IGNORECASE
)
_STATUS = "Status Message: "
_ONNX_TYPES = {"float32": "float", "float64": "double"}  # ONNX Runtime's names that differ from ours


def _failure(error: Exception) -> RuntimeFailure:
    text = f"ONNX Runtime failed: {brief(error)}"
    _, found, message = str(error).rpartition(_STATUS)
    if type(error).__name__ == "InvalidArgument" or (found and _BLAMES_INPUT.search(message)):
        return InputRefused(text, brief(message))
    return RuntimeFailure(text)
