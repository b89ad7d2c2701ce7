"""An ONNX file in MLServer: its runtime class, as MLServer's guide for custom runtimes has it. Runs in MLServer's own
environment, so it imports nothing of this project."""

from __future__ import annotations

import onnxruntime
from mlserver import MLModel
from mlserver.codecs import NumpyCodec
from mlserver.types import InferenceRequest, InferenceResponse


class OnnxModel(MLModel):
    """``parameters.uri`` is the file; ``parameters.extra.threads`` what one run may use, without busy waiting.

    Where that is absent, ONNX Runtime's defaults hold.
    """

    async def load(self) -> bool:
        """Open the session."""
        parameters = self.settings.parameters
        threads = (parameters.extra or {}).get("threads")
        options = onnxruntime.SessionOptions()
        if threads is not None:
            options.intra_op_num_threads = threads
            options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        self._session = onnxruntime.InferenceSession(parameters.uri, options, providers=["CPUExecutionProvider"])
        self._outputs = [output.name for output in self._session.get_outputs()]
        return True

    async def predict(self, payload: InferenceRequest) -> InferenceResponse:
        """One run: numpy in, numpy out."""
        feeds = {tensor.name: NumpyCodec.decode_input(tensor) for tensor in payload.inputs}
        answers = self._session.run(None, feeds)
        outputs = [NumpyCodec.encode_output(name, array) for name, array in zip(self._outputs, answers, strict=True)]
        return InferenceResponse(model_name=self.name, outputs=outputs)
