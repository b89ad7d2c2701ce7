"""Chooses the profile that answers where ``serving.yaml`` says ``auto``: by a rule that needs no measurement.

So every process, restart and replica serves the same profile on processors of one kind, and `bf16-serve check` names
it.
"""

from __future__ import annotations

from bf16kit.artifact.manifest import Manifest
from bf16kit.drift.metrics import Budget, DriftSummary


def in_order(
    manifest: Manifest, profiles: tuple[str, ...], budget: Budget, *, native: bool
) -> tuple[tuple[str, ...], str]:
    """Return the profiles to try, and why the first of them is the one to serve; "" if there is no choice.

    ``profiles`` are those for the device, the most accurate first. The others need fewer bits and are faster, so the
    last of them that nothing rules out (:func:`skip_reason`) goes first (docs/decisions/0035).
    """
    first, *others = profiles
    reason = ""
    for profile in reversed(others):
        skipped = skip_reason(manifest, profile, budget, native=native)
        if not skipped:
            return (profile, first), f"auto: {profile} is within budget, and this processor multiplies bf16"
        reason = f"auto: {profile} was skipped, {skipped}"
    return (first,), reason


def skip_reason(manifest: Manifest, profile: str, budget: Budget, *, native: bool) -> str:
    """Return why ``auto`` does not try ``profile``, which is not the most accurate; "" if it does.

    ``budget`` is the drift budget in force, which may be stricter than the artifact's. ``native``: the processor has
    the instructions that the profile needs.
    """
    entry = manifest.drift.get(profile)
    if entry is None or not entry.outputs:
        return "its drift was never measured"
    summaries = {output: DriftSummary(entry.samples, stats) for output, stats in entry.outputs.items()}
    breaches = [str(each) for output, found in sorted(summaries.items()) for each in budget.breaches(output, found)]
    if breaches:
        return f"its drift is over budget: {'; '.join(breaches)}"
    return "" if native else "this processor emulates it"
