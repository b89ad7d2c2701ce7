"""Runs PyTriton with models that return their inputs: ``python pytriton_server.py PORT``."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
from pytriton.decorators import batch
from pytriton.model_config import ModelConfig, Tensor
from pytriton.triton import Triton, TritonConfig, TritonSecurityConfig

TYPED = {
    "bool": np.bool_, "uint8": np.uint8, "uint16": np.uint16, "uint32": np.uint32, "uint64": np.uint64, "int8": np.int8,
    "int16": np.int16, "int32": np.int32, "int64": np.int64, "fp32": np.float32, "fp64": np.float64, "bytes": bytes,
}  # fmt: skip
MODELS = {"identity": ("fp32",), "typed": tuple(TYPED), "half": ("fp16", "fp32")}
TOKEN = "conformance"  # noqa: S105 -- no secret: PyTriton closes most RPCs to those who do not send it
KINDS = {**TYPED, "fp16": np.float16}


def echo(**inputs: Any) -> dict[str, Any]:
    """Return every input under the name of an output."""
    return {name.replace("in_", "out_"): array for name, array in inputs.items()}


def main(port: str) -> None:
    """Serve until interrupted."""
    config = TritonConfig(
        grpc_port=int(port), grpc_address="127.0.0.1", allow_http=True, http_port=int(port) + 1, allow_metrics=False
    )
    security = TritonSecurityConfig(access_token=TOKEN)
    with Triton(config=config, security_config=security) as triton:
        for name, kinds in MODELS.items():
            triton.bind(
                model_name=name,
                infer_func=batch(echo),
                inputs=[Tensor(name=f"in_{kind}", dtype=KINDS[kind], shape=(4,)) for kind in kinds],
                outputs=[Tensor(name=f"out_{kind}", dtype=KINDS[kind], shape=(4,)) for kind in kinds],
                config=ModelConfig(max_batch_size=8),
                strict=True,
            )
        triton.serve()


if __name__ == "__main__":
    main(*sys.argv[1:])
