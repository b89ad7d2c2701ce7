"""``bf16-serve`` that waits a few seconds where the real one waits for up to half an hour."""

import os

from bf16kit.service.cli import main
from bf16kit.service.models import loading, loads

if __name__ == "__main__":
    assert {loads.SLOW_SECONDS, loads.PATIENCE_SECONDS, loading.STEP_SECONDS, loading.FIRST_RUN_SECONDS} == {
        30.0,
        10.0,
        1800.0,
        300.0,
    }
    loads.PATIENCE_SECONDS = 1.0
    loads.SLOW_SECONDS = 2.0
    loading.STEP_SECONDS = float(os.environ["STEP_SECONDS"])
    loading.FIRST_RUN_SECONDS = float(os.environ["FIRST_RUN_SECONDS"])
    main()
