"""The versions of the manifest's schema, and the digest that seals its bytes, so that a flipped bit is detected.

The digest is computed with its own 64 digits as zeros. It is stored at the top level, under ``"digest"``.
"""

from __future__ import annotations

import hashlib
import json
import re
from typing import Any

# What each version added: 2 panels; 3 the oracle, measurements, requirements, reason codes and bounds of quantiles;
# 4 profile cpu-bf16 and golden samples of a profile's own; 5 exports and profiles of format pt2; 6 files that were
# given beside the checkpoint; 7 slice errors, and top1_agreement judged at its measured value.
SCHEMA_VERSION = 7  # the newest, which is written; all of them are read
SINCE_SLICES = 7

FIELD = "digest"
_LINE = re.compile(rb'^ "digest": "([0-9a-f]{64})",?$', re.MULTILINE)  # one space of indentation: the top level
_ZEROS = b"0" * 64


def dump(fields: dict[str, Any]) -> bytes:
    """Return ``fields`` as canonical JSON (sorted keys, one space, UTF-8, a newline at the end) with its digest."""
    unsealed = fields | {FIELD: _ZEROS.decode()}
    data = (json.dumps(unsealed, sort_keys=True, indent=1, ensure_ascii=False, allow_nan=False) + "\n").encode()
    return _with_digest(data, hashlib.sha256(data).hexdigest().encode())


def is_intact(data: bytes) -> bool:
    """Return whether ``data`` carries a digest and is exactly what was sealed."""
    found = _LINE.search(data)
    return found is not None and hashlib.sha256(_with_digest(data, _ZEROS)).hexdigest().encode() == found[1]


def _with_digest(data: bytes, digest: bytes) -> bytes:
    return _LINE.sub(lambda line: line[0].replace(line[1], digest), data, count=1)
