"""All checks, in the order in which they run: the least harmful first, those that may kill a server last."""

from __future__ import annotations

from oip_conformance.checks import (
    calls,
    classification,
    control,
    danger,
    datatypes,
    health,
    inference,
    memory,
    memorytensors,
    metadata,
    parameters,
    refusals,
    server,
    settings,
    statistics,
    streams,
)
from oip_conformance.suite import collect

CHECKS = collect(
    server,
    metadata,
    inference,
    datatypes,
    refusals,
    parameters,
    streams,
    statistics,
    classification,
    memory,
    memorytensors,
    settings,
    health,
    control,
    calls,
    danger,
)
