"""The errors bf16kit expects, in one small tree.

Everything derived from :class:`Bf16kitError` is *expected*. Its text names the value, the bound and the remedy, and is
safe to show to the caller or operator who caused it. Any other exception is a bug: the log gets its traceback, and
callers are told only that something failed. Exit codes live in ``bf16kit.converter.cli``, gRPC codes in
``bf16kit.service.grpc.status``: one table each.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from bf16kit.drift.table import Drift


class Bf16kitError(Exception):
    """Base of every expected error."""


class UsageError(Bf16kitError):
    """Wrong usage, or input that cannot be read."""


class ConfigError(UsageError):
    """A configuration value is unknown, out of range, or contradicts another."""


class SourceError(UsageError):
    """The checkpoint cannot be read, is not what it claims to be, or does not fit the model."""


class NoCheckpoint(SourceError):
    """The path holds no checkpoint of any format, not even a damaged one."""


class SamplesError(UsageError):
    """Calibration samples cannot be read or do not fit the model's inputs."""


class ArtifactExists(UsageError):
    """The target of a conversion already exists."""


class ArtifactError(UsageError):
    """A directory is not a usable artifact."""


class ArtifactDamaged(ArtifactError):
    """A file of the artifact is missing, has another size, or another digest than the manifest says."""


class ManifestVersionError(ArtifactError):
    """The manifest was written by a newer bf16kit."""


class ConversionError(Bf16kitError):
    """A readable model that cannot be converted."""


class RangeError(ConversionError):
    """Weights that bf16 cannot hold: NaN, infinite, or overflowing."""


class BudgetExceeded(Bf16kitError):
    """Measured drift is over the owner's budget; ``drift`` has the figures if it stopped a conversion."""

    def __init__(self, text: str, drift: Drift | None = None) -> None:
        super().__init__(text)
        self.drift = drift


class RuntimeFailure(Bf16kitError):
    """A runtime could not load a graph or run it. The text is for the log, never for a remote caller."""


class InputRefused(RuntimeFailure):
    """A runtime failed because of an input's values: an index out of range, or a size that does not fit.

    ``reason`` is the runtime's explanation without names of files or nodes, so it may be sent to the caller.
    """

    def __init__(self, text: str, reason: str) -> None:
        super().__init__(text)
        self.reason = reason


class DeviceUnavailable(RuntimeFailure):
    """The requested device, or the library that drives it, is missing."""


class RequestError(Bf16kitError):
    """A rejected request; the text is for the caller, and ``reason`` is the label that the metrics use, "" for none."""

    def __init__(self, text: str, reason: str = "") -> None:
        super().__init__(text)
        self.reason = reason


class InvalidRequest(RequestError):
    """The request does not fit the model: a name, dtype, shape, size or parameter is wrong."""


class NotFound(RequestError):
    """No such model, or no such version."""


class AlreadyExists(RequestError):
    """The name of what the request would create is already taken."""


class Unavailable(RequestError):
    """The model is loading or unloading, or the server is draining."""


class Overloaded(RequestError):
    """No capacity left. The text names the bound and its value."""

    def __init__(self, text: str, reason: str = "queue_full") -> None:
        super().__init__(text, reason)


class DeadlineExceeded(RequestError):
    """The caller's deadline passed before the request ran."""


class Cancelled(RequestError):
    """The caller cancelled before the request ran."""


class Unauthenticated(RequestError):
    """The caller sent no credentials, or credentials that are not valid."""


class Forbidden(RequestError):
    """The caller is authenticated but not authorized to do this."""


class Unsupported(RequestError):
    """A part of the protocol that this server does not implement."""
