"""The models of a repository: loaded, gated, ready or not, and how each is served."""
