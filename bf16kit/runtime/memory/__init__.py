"""Memory for weights: private, shared, sealed, or in a temporary file."""
