"""Several processes that serve together, and what they share."""
