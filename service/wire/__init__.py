"""Protocol messages to arrays and back: decodes and checks requests, and encodes responses."""
