"""The process with the fp32 references: what it does, how samples reach it, and the side that leads it."""
