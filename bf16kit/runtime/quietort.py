"""ONNX Runtime, imported in this one place, where its telemetry is turned off first.

Builds from 1.31 on write a device id and a database of events under ``~/.cache`` as soon as they are imported, unless
the environment says not to. Someone who wants that sets ``ORT_DISABLE_TELEMETRY=0``.
"""

from __future__ import annotations

import os

os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")

import onnxruntime as ort

__all__ = ["ort"]
