"""What a manifest says was measured: drift by profile, and how far the reference is from the source's own answers.

A float that is not finite is written as the string ``"inf"``, ``"-inf"`` or ``"nan"``, because JSON has no word for it.
"""

from __future__ import annotations

import math
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, PlainSerializer

from bf16kit.entries import STRICT, Size


def _read_number(value: Any) -> Any:
    return float(value) if value in ("inf", "-inf", "nan") else value


def _write_number(value: float) -> float | str:
    return value if math.isfinite(value) else str(value)


Number = Annotated[float, BeforeValidator(_read_number), PlainSerializer(_write_number, when_used="json")]


def drawn_at_random(source: str) -> bool:
    """Whether the samples that a :class:`DriftEntry` names were drawn at random, for want of any: they are called so.

    Live inputs are not like them, so that nothing that is compared with live ones may come of them.
    """
    return source.startswith("random ")


class _Entry(BaseModel):
    model_config = STRICT


class DriftEntry(_Entry):
    """Drift measured at conversion: ``outputs[output][metric][stat]``, from ``bf16kit.drift.DriftSummary.as_dict``."""

    samples: int
    source: str
    outputs: dict[str, dict[str, dict[str, Number]]]
    emulated: bool = False


class OracleFigure(_Entry):
    """How far the fp32 reference is from the source's own answer in one output, and the most that was allowed."""

    relative_l2: Number
    max_abs: Number
    bound: Number


class OracleEntry(_Entry):
    """Whether the fp32 reference was checked against the source's own answers, before anything was done to it.

    ``how`` says who answered, or why nobody could; ``feeds`` how many samples were compared.
    """

    checked: bool
    how: str
    feeds: Size = 0
    outputs: dict[str, OracleFigure] = {}
