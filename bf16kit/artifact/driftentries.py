"""Manifest entries for measurements: drift by profile, and the reference's distance from the source's outputs.

A float that is not finite is written as the string ``"inf"``, ``"-inf"`` or ``"nan"``, because JSON cannot express it.
"""

from __future__ import annotations

import math
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, PlainSerializer

from bf16kit.artifact.entries import STRICT, Size


def _read_number(value: Any) -> Any:
    return float(value) if value in ("inf", "-inf", "nan") else value


def _write_number(value: float) -> float | str:
    return value if math.isfinite(value) else str(value)


Number = Annotated[float, BeforeValidator(_read_number), PlainSerializer(_write_number, when_used="json")]


def drawn_at_random(source: str) -> bool:
    """Return whether the samples of a :class:`DriftEntry`, whose ``source`` this is, were drawn at random.

    They are drawn when none were given, and ``source`` says so. They differ from live inputs, so do not derive anything
    from them that is compared with live ones.
    """
    return source.startswith("random ")


class _Entry(BaseModel):
    model_config = STRICT


class DriftEntry(_Entry):
    """Drift measured at conversion: ``outputs[output][metric][stat]``, as ``DriftSummary.as_dict`` gives it."""

    samples: int
    source: str
    outputs: dict[str, dict[str, dict[str, Number]]]
    emulated: bool = False


class OracleFigure(_Entry):
    """The fp32 reference's distance from the source framework in one output, and the bound on ``relative_l2``."""

    relative_l2: Number
    max_abs: Number
    bound: Number


class OracleEntry(_Entry):
    """Whether the fp32 reference was checked against the source framework's own outputs, before any rounding.

    ``how`` names the program that computed them, or the reason why none could; ``feeds`` is how many samples were
    compared.
    """

    checked: bool
    how: str
    feeds: Size = 0
    outputs: dict[str, OracleFigure] = {}
