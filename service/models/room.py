"""Whether a container has room for a model, asked before it is loaded.

The system ends a container that takes more memory than it may, tells nobody why, and whoever starts it again has it end
again. A model that plainly does not fit is therefore refused in words, and the rest of the server goes on.
"""

from __future__ import annotations

import logging

from bf16kit import controlgroup
from bf16kit.controlgroup import RESERVE
from bf16kit.errors import ConfigError
from service.models.opening import Opened

_log = logging.getLogger(__name__)


def check_room(opened: Opened, profile: str) -> None:
    """Raises ConfigError where the container may not take the weights of ``profile`` and a little to run them with.

    What loading takes beside them, and runs, is not known before: where that is too much the last word of the log is
    what is being loaded, and how much there was.
    """
    memory = controlgroup.memory()
    least = least_bytes(opened, profile)
    if memory is None or not least:
        return
    if not memory.has_room(least):
        raise ConfigError(
            f"it takes {(least + RESERVE) / 1e6:.0f} MB of memory at least, and {memory}; raise the container's limit"
            " (docker run --memory, resources.limits.memory), or serve fewer models in it"
        )
    _log.info("%s: %.0f MB of weights are loaded now; %s", opened.artifact.path, least / 1e6, memory)


def least_bytes(opened: Opened, profile: str) -> int:
    """That loading ``profile`` takes for sure: its weights as they are stored; none of those that are mapped, which
    the system can take back."""
    entry = opened.artifact.manifest.profiles.get(profile)
    if entry is not None and entry.format != "onnx":
        return opened.artifact.manifest.files[entry.graph].bytes
    return opened.weight_bytes if opened.artifact.copies else 0
