"""The artifact on disk: its manifest, the checks before use, and how it is written and published."""
