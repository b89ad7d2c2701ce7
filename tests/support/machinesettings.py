"""The settings of state machines: how many examples follows from hypothesis' profile, as does the seed."""

from hypothesis import HealthCheck, settings


def machine_settings(share: float, steps: int = 40, *, in_ci: float | None = None) -> settings:
    """Return settings with this share of the profile's examples, each of at most ``steps`` steps.

    ``in_ci`` is the share in CI, where every run tries the same examples. Machines start servers, so a step takes
    milliseconds; hypothesis' check for slow data expects microseconds.
    """
    profile = settings.default or settings()
    if profile.derandomize and in_ci is not None:
        share = in_ci
    return settings(
        max_examples=max(1, round(profile.max_examples * share)),
        stateful_step_count=steps,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
    )
