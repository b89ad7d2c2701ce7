"""Says whom a conversion trusts: a source that is a program is loaded only if the user trusts whoever wrote it."""

from __future__ import annotations

from pathlib import Path

from bf16kit.messages.errors import SourceError
from converter.options import Options


def check_trusted(options: Options, what: str) -> None:
    """Raise :class:`SourceError` unless ``--trust-code`` was given; ``what`` names the kind of source.

    It is for sources that are programs: loading one runs the code in it.
    """
    if not options.trust_code:
        raise untrusted(options.source, f"is {what}")


_REMEDY = "save its weights as safetensors or the model as ONNX"


def untrusted(path: Path, reason: str, remedy: str = _REMEDY) -> SourceError:
    """Return the error for the program at ``path``; ``reason`` says what it is, ``remedy`` how to do without it."""
    return SourceError(
        f"{path}: {reason}, and loading it runs the code in it: whoever writes it decides what runs, as with Triton and"
        f" TorchServe; {remedy}, or pass --trust-code if you trust them"
    )
