"""Imports ONNX Runtime, for the whole project, after turning its telemetry off.

Builds from 1.31 on write a device id and a database of events under ``~/.cache`` on import, unless the environment
forbids it. To allow it, set ``ORT_DISABLE_TELEMETRY=0``.
"""

from __future__ import annotations

import os

os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")

import onnxruntime as ort

__all__ = ["ort"]
