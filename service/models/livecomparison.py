"""Builds the comparison of live responses with the fp32 reference, and with the drift at conversion."""

from __future__ import annotations

import logging
from dataclasses import replace

from bf16kit.errors import ArtifactError
from bf16kit.wording import brief
from service.drift.calibration import Calibration
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
        scales = {} if opened.artifact.manifest.golden is None else opened.artifact.golden().scales
    except (ArtifactError, OSError) as error:
        _log.warning("model %r version %d: the measurements cannot be read: %s", model, version, brief(error))
        measurements, scales = None, {}
    return Comparison(
        opened.outputs,
        opened.batch_axis,
        opened.budget,
        model=model,
        version=version,
        calibration=replace(Calibration.of(opened.artifact.manifest, measurements), scales=scales),
    )
