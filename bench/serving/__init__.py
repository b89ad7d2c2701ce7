"""`bf16-serve` under load."""
