"""The process that has the fp32 references: how it is led, what samples travel in, and what it does."""
