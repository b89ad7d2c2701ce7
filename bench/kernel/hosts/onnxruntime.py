"""ONNX Runtime in fp32, as who knows only its name opens it; ``options`` are entries of its session's configuration."""

from __future__ import annotations

from collections.abc import Mapping

from bench.kernel.hosts import Feeds, Prepare, Run, Subject
from bf16kit.runtime.ort.session import ort


def open_side(options: Mapping[str, str], subject: Subject) -> Prepare:
    """Every other option is at its default: all optimisations, a thread per core, weights repacked."""
    configured = ort.SessionOptions()
    for key, value in options.items():
        configured.add_session_config_entry(key, value)
    session = ort.InferenceSession(str(subject.graph), configured, providers=["CPUExecutionProvider"])

    def prepare(feeds: Feeds, _: float) -> Run:
        given = dict(feeds)
        return lambda: session.run(None, given)

    return prepare
