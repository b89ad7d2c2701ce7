"""The operator's commands: everything `bf16-serve` does besides serving. They run the server's own code."""
