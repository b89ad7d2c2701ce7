"""``python -m service`` is ``bf16-serve``."""

from service.cli import main

main()
