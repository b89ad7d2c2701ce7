"""Opens a model's fp32 reference in this process."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

from bf16kit.messages.errors import ConfigError
from bf16kit.system import controlgroup
from service.contract import Array
from service.drift.shadow import Reference
from service.models.opened import OpenedArtifact
from service.shadow.activity import ActivityTracker
from service.shadow.memory import ReferenceMemory, default_bound, fp32_bytes

_log = logging.getLogger(__name__)


def open_reference(
    name: str,
    opened: OpenedArtifact,
    memory: ReferenceMemory,
    tracker: ActivityTracker,
) -> Reference:
    """Load the reference, for the low-priority thread that will call it.

    Raises ConfigError if it exceeds its memory bound, and whatever loading raises.
    """
    from bf16kit.runtime.loading import load_reference
    from bf16kit.runtime.memory import weights as _weights  # noqa: F401 -- as above
    from bf16kit.runtime.ort import onnx as _onnx  # noqa: F401 -- now: what the library takes is no reference's

    weights, room = fp32_bytes(opened.artifact.manifest), controlgroup.memory()
    if room is not None and not room.has_room(weights):
        raise ConfigError(f"its weights are {weights} bytes in fp32, and {room}; raise the container's limit")
    bound = default_bound(weights, room)
    if weights > bound:
        raise ConfigError(f"its weights are {weights} bytes in fp32, over the {bound} that it may take")
    with tracker.track(name, "loading"):
        _log.info("%s: its fp32 reference is being loaded", name)  # logged first, in case loading kills the process
        reference = memory.load(name, bound, lambda: load_reference(opened.artifact, threads=1))
    return TrackedReference(name, reference, tracker)


class TrackedReference:
    """A :class:`service.drift.shadow.Reference` whose runs are tracked."""

    def __init__(self, name: str, reference: Reference, tracker: ActivityTracker) -> None:
        self._name = name
        self._reference = reference
        self._tracker = tracker

    @property
    def up(self) -> bool:
        return self._reference.up

    def run(self, feeds: Mapping[str, Array], outputs: Sequence[str], *, seconds: float) -> dict[str, Array]:
        """See :meth:`service.drift.shadow.Reference.run`."""
        with self._tracker.track(self._name, "running"):
            return self._reference.run(feeds, outputs, seconds=seconds)

    def close(self) -> None:
        self._reference.close()
