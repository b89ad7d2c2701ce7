"""Converts fp32 checkpoints to bf16 artifacts, serves them, and measures the loss of accuracy.

>>> import bf16kit
>>> sorted(name for name in dir(bf16kit) if name[0].islower())
['compare', 'convert', 'load', 'serve']

docs/python.md shows them at work. Each is imported when it is first used, so importing this package takes no time.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from bf16kit.api.conversion import Conversion as Conversion
    from bf16kit.api.conversion import convert as convert
    from bf16kit.api.model import Model as Model
    from bf16kit.api.model import compare as compare
    from bf16kit.api.model import load as load
    from bf16kit.api.server import Server as Server
    from bf16kit.api.server import serve as serve
    from bf16kit.drift.table import Drift as Drift
    from bf16kit.messages.errors import ArtifactError as ArtifactError
    from bf16kit.messages.errors import Bf16kitError as Bf16kitError
    from bf16kit.messages.errors import BudgetExceeded as BudgetExceeded
    from bf16kit.messages.errors import ConversionError as ConversionError
    from bf16kit.messages.errors import InvalidRequest as InvalidRequest
    from bf16kit.messages.errors import RuntimeFailure as RuntimeFailure
    from bf16kit.messages.errors import UsageError as UsageError

__version__ = "0.1.0"

_HOMES = {
    **dict.fromkeys(("Conversion", "convert"), "bf16kit.api.conversion"),
    **dict.fromkeys(("Model", "compare", "load"), "bf16kit.api.model"),
    **dict.fromkeys(("Server", "serve"), "bf16kit.api.server"),
    "Drift": "bf16kit.drift.table",
    **dict.fromkeys(("ArtifactError", "Bf16kitError", "BudgetExceeded", "ConversionError"), "bf16kit.messages.errors"),
    **dict.fromkeys(("InvalidRequest", "RuntimeFailure", "UsageError"), "bf16kit.messages.errors"),
}
__all__ = [*_HOMES, "__version__"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return __all__
