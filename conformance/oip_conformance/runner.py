"""Runs checks one after the other and returns their results."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase

from oip_conformance.protocol import inference_pb2 as pb
from oip_conformance.reports import Outcome, Result
from oip_conformance.session import Session
from oip_conformance.suite import Check, Failed, Level, Skipped


def select_checks(checks: Iterable[Check], only: Sequence[str], without: Sequence[str]) -> list[Check]:
    """Return the checks whose id is in ``only`` (all if empty) and not in ``without``. Both may contain ``*``."""

    def listed(check: Check, patterns: Sequence[str]) -> bool:
        return any(fnmatchcase(check.id, pattern) or fnmatchcase(check.id, f"{pattern}/*") for pattern in patterns)

    return [check for check in checks if (not only or listed(check, only)) and not listed(check, without)]


def run(session: Session, checks: Iterable[Check]) -> list[Result]:
    """Run every check and return its result. A check of an extension that the server does not declare is skipped."""
    return [_run_check(session, check) for check in checks]


def _run_check(session: Session, check: Check) -> Result:
    if check.needs and check.needs not in session.extensions:
        return Result(check, Outcome.SKIPPED, 0.0, reason=f"the server does not declare {check.needs}")
    if check.needs in session.restricted:
        return Result(
            check, Outcome.SKIPPED, 0.0, reason=f"it wants credentials (--metadata): {session.restricted[check.needs]}"
        )
    started = time.monotonic()
    try:
        check.run(session)
    except Skipped as skipped:
        return Result(check, Outcome.SKIPPED, time.monotonic() - started, reason=str(skipped))
    except Failed as broken:
        outcome = Outcome.WARNED if check.level is Level.SHOULD else Outcome.FAILED
        return Result(check, outcome, time.monotonic() - started, broken.sent, broken.expected, broken.actual)
    return Result(check, Outcome.PASSED, time.monotonic() - started)


def server_label(session: Session) -> str:
    """Return the server's own name and version."""
    answer = session.target.call(pb.ServerMetadataRequest())
    return f"{answer.message.name} {answer.message.version}" if answer.ok else "a server without metadata"
