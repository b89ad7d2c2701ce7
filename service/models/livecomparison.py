"""Builds the comparison of live responses with the fp32 reference, and with the drift at conversion."""

from __future__ import annotations

import logging
from dataclasses import replace

from bf16kit.messages.errors import ArtifactError
from bf16kit.messages.wording import brief
from service.drift.calibration import Calibration, all_finite
from service.drift.comparison import Comparison
from service.models.opening import OpenedArtifact

_log = logging.getLogger(__name__)


def new_comparison(model: str, version: int, opened: OpenedArtifact) -> Comparison:
    """Return the comparison for one version, with the budget in force, which may differ from the artifact's.

    It reads the artifact's measurements. If they cannot be read, the expected drift is learnt from live samples
    instead, and the log says so.
    """
    try:
        measurements = opened.artifact.measurements()
        golden = None if opened.artifact.manifest.golden is None else opened.artifact.golden()
    except (ArtifactError, OSError) as error:
        _log.warning("model %r version %d: the measurements cannot be read: %s", model, version, brief(error))
        measurements, golden = None, None
    calibration = Calibration.of(opened.artifact.manifest, measurements)
    if golden is not None:
        infinite = frozenset(name for name, output in golden.outputs.items() if not all_finite(output))
        calibration = replace(calibration, scales=golden.scales, infinite=infinite)
    return Comparison(
        opened.outputs,
        opened.batch_axis,
        opened.budget,
        model=model,
        version=version,
        calibration=calibration,
    )
