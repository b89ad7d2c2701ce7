"""Finds environment variables with the server's prefix that nothing reads: a typo would go unnoticed."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping

from bf16kit.wording import first_few, quoted
from service.process.config import ENV_PREFIX, ServerConfig

# Other variables with the prefix: read by the command line, the CPU kernel, `health`, and the converter.
_OTHERS = (
    "CONFIG",
    "HEALTH_CERTIFICATE",
    "HEALTH_KEY",
    "KERNEL_PATH",
    "TENSORFLOW_PYTHON",
    "TENSORFLOW_SECONDS",
    "TOKEN",
)
# Variables that Kubernetes sets in every pod for a Service whose name begins with bf16kit: no typos.
_OF_A_SERVICE = re.compile(r".*_SERVICE_(HOST|PORT.*)|.*_PORT_\d+_(TCP|UDP|SCTP).*")
_ALIKE = 0.8  # similarity, of 1: a missing or wrong letter, or two swapped ones


def unknown_variables(environment: Mapping[str, str]) -> str:
    """Return a message that names the variables that nothing reads; "" if there are none.

    Each is shown with the most similar known one, and without its value, which may be a secret.
    """
    known = [ENV_PREFIX + name.upper() for name in (*ServerConfig.model_fields, *_OTHERS)]
    given = (name for name in sorted(environment) if name.upper().startswith(ENV_PREFIX))
    unknown = [name for name in given if name.upper() not in known and not _of_a_service(name, environment[name])]
    if not unknown:
        return ""
    told = first_few([_with_what_is_meant(name, known) for name in unknown])
    return f"unknown environment variables are ignored: {told}; docs/operations.md names every setting"


def _with_what_is_meant(name: str, known: list[str]) -> str:
    alike = difflib.get_close_matches(name.upper(), known, 1, _ALIKE)
    return f"{quoted(name)} ({alike[0]}?)" if alike else quoted(name)


def _of_a_service(name: str, value: str) -> bool:
    return _OF_A_SERVICE.fullmatch(name) is not None or (name.endswith("_PORT") and "://" in value)
