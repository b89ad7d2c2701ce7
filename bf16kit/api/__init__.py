"""The Python interface: what ``import bf16kit`` offers, above the converter and the server."""
