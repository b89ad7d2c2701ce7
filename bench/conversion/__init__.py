"""`bf16-convert`: time, memory, sizes, and the drift that it makes."""
