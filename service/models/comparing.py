"""What compares live answers of an artifact with its fp32 reference's, and with what its conversion measured."""

from __future__ import annotations

import logging

from bf16kit.errors import ArtifactError
from bf16kit.wording import brief
from service.drift.calibration import Calibration
from service.drift.comparison import Comparison
from service.models.opening import Opened

_log = logging.getLogger(__name__)


def new_comparison(model: str, version: int, opened: Opened) -> Comparison:
    """Of one version, whose budget may be another than its artifact's. Reads the artifact's measurements; where they
    cannot be read, what to expect is learnt, and the log says so."""
    try:
        measurements = opened.artifact.measurements()
    except (ArtifactError, OSError) as error:
        _log.warning("model %r version %d: what was measured cannot be read: %s", model, version, brief(error))
        measurements = None
    return Comparison(
        opened.outputs,
        opened.batch_axis,
        opened.budget,
        model=model,
        version=version,
        calibration=Calibration.of(opened.artifact.manifest, measurements),
    )
