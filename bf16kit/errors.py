"""The errors bf16kit expects, in one small tree.

Everything derived from :class:`Bf16kitError` is *expected*: its text names the value, the bound and the remedy, and is
safe to show to whoever caused it. Anything else that escapes is a bug: it goes to the log with its traceback, and
callers are told only that something failed. Exit codes live in ``converter.cli``, gRPC codes in
``service.transport.status``: one table each.
"""

from __future__ import annotations


class Bf16kitError(Exception):
    """Base of every expected error."""


# --- what an operator or a user of the command line did -------------------------------------------------------------


class UsageError(Bf16kitError):
    """Wrong usage, or input that cannot be read."""


class ConfigError(UsageError):
    """A configuration value is unknown, out of range, or contradicts another."""


class SourceError(UsageError):
    """The checkpoint cannot be read, is not what it claims to be, or does not fit the model."""


class NoCheckpoint(SourceError):
    """What lies there is no checkpoint of any format, nor a damaged one."""


class SamplesError(UsageError):
    """Calibration samples cannot be read or do not fit the model's inputs."""


class ArtifactExists(UsageError):
    """The target of a conversion is already there."""


# --- artifacts ------------------------------------------------------------------------------------------------------


class ArtifactError(UsageError):
    """A directory is not a usable artifact."""


class ArtifactDamaged(ArtifactError):
    """A file of the artifact is missing, has another size, or another digest than the manifest says."""


class ManifestVersionError(ArtifactError):
    """The manifest was written by a newer bf16kit."""


# --- conversion -----------------------------------------------------------------------------------------------------


class ConversionError(Bf16kitError):
    """A readable model that cannot be converted."""


class RangeError(ConversionError):
    """Weights that bf16 cannot hold: NaN, infinite, or overflowing."""


class BudgetExceeded(Bf16kitError):
    """Measured drift is over the owner's budget."""


# --- running --------------------------------------------------------------------------------------------------------


class RuntimeFailure(Bf16kitError):
    """A runtime could not load a graph or run it. The text is for the log, never for a remote caller."""


class InputRefused(RuntimeFailure):
    """A runtime says that it failed because of what an input holds: an index out of range, a size that does not fit.

    ``reason`` is what the runtime says of it, without names of files or nodes: it may be told to the caller.
    """

    def __init__(self, text: str, reason: str) -> None:
        super().__init__(text)
        self.reason = reason


class DeviceUnavailable(RuntimeFailure):
    """The device asked for, or the library that drives it, is not there."""


# --- requests -------------------------------------------------------------------------------------------------------


class RequestError(Bf16kitError):
    """A request that is refused; the text is for the caller."""


class InvalidRequest(RequestError):
    """The request does not fit the model: a name, dtype, shape, size or parameter is wrong."""


class NotFound(RequestError):
    """No such model, or no such version."""


class AlreadyExists(RequestError):
    """What was to be made has a name that is taken."""


class Unavailable(RequestError):
    """The model is loading or unloading, or the server is draining: then ``reason`` is the metrics' word for it."""

    def __init__(self, text: str, reason: str = "") -> None:
        super().__init__(text)
        self.reason = reason


class Overloaded(RequestError):
    """No room. The text says which bound, and how much; ``reason`` is the metrics' word for it, e.g. ``queue_full``."""

    def __init__(self, text: str, reason: str = "queue_full") -> None:
        super().__init__(text)
        self.reason = reason


class DeadlineExceeded(RequestError):
    """The caller's deadline passed before the request ran."""


class Cancelled(RequestError):
    """The caller left before the request ran."""


class Unauthenticated(RequestError):
    """The caller did not say who it is, or not believably."""


class Forbidden(RequestError):
    """The caller is known, and may not do this."""


class Unsupported(RequestError):
    """A part of the protocol that this server does not offer."""
