"""Finds environment variables with the server's prefix that nothing reads: a typo would go unnoticed."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping

from bf16kit.messages.wording import first_few, quoted
from service.config.serverconfig import ENV_PREFIX, ServerConfig

# Other variables with the prefix: read by the command line, the CPU kernel, `health`, and the converter.
_OTHERS = (
    "CONFIG",
    "HEALTH_CERTIFICATE",
    "HEALTH_KEY",
    "KERNEL_PATH",
    "TENSORFLOW_PYTHON",
    "TOKEN",
)
# Variables that Kubernetes sets in every pod for a Service whose name begins with bf16kit: no typos.
_KUBERNETES_SERVICE = re.compile(r".*_SERVICE_(HOST|PORT.*)|.*_PORT_\d+_(TCP|UDP|SCTP).*")
_MIN_SIMILARITY = 0.8  # similarity, of 1: a missing or wrong letter, or two swapped ones


def unknown_variables(environment: Mapping[str, str]) -> str:
    """Return a message that names the variables that nothing reads; "" if there are none.

    Each is shown with the most similar known one, and without its value, which may be a secret.
    """
    known = [ENV_PREFIX + name.upper() for name in (*ServerConfig.model_fields, *_OTHERS)]
    given = (name for name in sorted(environment) if name.upper().startswith(ENV_PREFIX))
    unknown = [
        name for name in given if name.upper() not in known and not _is_set_by_kubernetes(name, environment[name])
    ]
    if not unknown:
        return ""
    listed = first_few([_with_suggestion(name, known) for name in unknown])
    return f"unknown environment variables are ignored: {listed}; docs/operations.md names every setting"


def _with_suggestion(name: str, known: list[str]) -> str:
    similar = difflib.get_close_matches(name.upper(), known, 1, _MIN_SIMILARITY)
    return f"{quoted(name)} ({similar[0]}?)" if similar else quoted(name)


def _is_set_by_kubernetes(name: str, value: str) -> bool:
    return _KUBERNETES_SERVICE.fullmatch(name) is not None or (name.endswith("_PORT") and "://" in value)
