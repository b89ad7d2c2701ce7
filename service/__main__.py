"""Entry point of ``python -m service``: the same as ``bf16-serve``."""

from service.cli import main

main()
