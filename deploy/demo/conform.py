"""``make conformance``: serve the demo's model and check the server against the protocol; arguments go to the suite.

Exit codes are the suite's: 0 conforms, 1 does not, 2 could not be checked.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from demo import REPOSITORY
from publish import MODEL
from running import DemoFailed, running_server

# Enables everything that is off by default, so that the suite checks all that a client can ask for.
ENABLED = {
    "BF16KIT_SHARED_MEMORY": "true",
    "BF16KIT_MODEL_CONTROL": "explicit",
    "BF16KIT_LOAD_MODEL": '["*"]',
}
# Real tokens for this input; the suite makes ones for the model's other inputs. Streams belong to the extension
# "sequence", of which the server implements nothing else, so the server does not declare it.
SUITE_ARGUMENTS = (
    "--input", "input_ids=1,8/101,7592,1010,2088,999,102", "--control", MODEL, "--region-prefix", "bf16kit_",
    "--assume", "sequence",
)  # fmt: skip


def main(arguments: list[str]) -> int:
    """Run the suite against a server of the demo's repository."""
    try:
        os.environ |= ENABLED
        with running_server(REPOSITORY) as (address, _):
            suite = Path(sys.executable).with_name("oip-conformance")
            command = [str(suite), address, "--model", MODEL, *SUITE_ARGUMENTS, *arguments]
            return subprocess.run(command, check=False).returncode
    except DemoFailed as failure:
        print(f"conformance: {failure}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
