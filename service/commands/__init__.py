"""The operator's commands: what `bf16-serve` does beside serving, with the code that serves."""
