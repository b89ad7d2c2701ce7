"""The models of a repository: loading, the golden gate, readiness, and how each model is served."""
