"""Processes of one server, started and led by one of them: what they tell each other, and that none outlives it."""
