"""A Hugging Face model directory: the architecture from config.json, the weights from its own files."""
