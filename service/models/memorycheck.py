"""Checks, before a model is loaded, that the container has enough memory for it.

The kernel kills a container that exceeds its memory limit, without a message, and a restarted container would be killed
again. So a model that clearly does not fit is rejected with a message, and the rest of the server goes on.
"""

from __future__ import annotations

import logging

from bf16kit.messages.errors import ConfigError
from bf16kit.system import controlgroup
from bf16kit.system.controlgroup import RESERVE
from service.models.opening import OpenedArtifact

_log = logging.getLogger(__name__)


def check_room(opened: OpenedArtifact, profile: str) -> None:
    """Raise ConfigError if the container has no room for the weights of ``profile`` and a little memory to run them.

    The memory that loading and running take in addition is not known before. If that is too much, the log's last line
    tells which model was being loaded, and how much memory was left.
    """
    memory = controlgroup.memory()
    least = least_bytes(opened, profile)
    if memory is None or not least:
        return
    if not memory.has_room(least):
        raise ConfigError(
            f"it needs {(least + RESERVE) / 1e6:.0f} MB of memory at least, and {memory}; raise the container's limit"
            " (docker run --memory, resources.limits.memory), or serve fewer models in it"
        )
    _log.info("%s: %.0f MB of weights are loaded now; %s", opened.artifact.path, least / 1e6, memory)


def least_bytes(opened: OpenedArtifact, profile: str) -> int:
    """Return the least memory in bytes that loading ``profile`` takes: its stored weights.

    Mapped weights do not count, since the kernel can reclaim them.
    """
    entry = opened.artifact.manifest.profiles.get(profile)
    if entry is not None and entry.format != "onnx":
        return opened.artifact.manifest.files[entry.graph].bytes
    return opened.weight_bytes if opened.artifact.copies else 0
