"""Entry point of ``python -m bf16kit.service``: the same as ``bf16-serve``."""

from bf16kit.service.cli import main

main()
