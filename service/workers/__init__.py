"""Several worker processes that serve together under a supervisor, and the state they share."""
