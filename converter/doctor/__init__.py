"""``bf16-convert doctor``: what is installed, what can be converted with it, and what is missing for the rest."""
