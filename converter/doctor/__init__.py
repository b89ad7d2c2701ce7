"""``bf16-convert doctor``: reports what is installed, what it can convert, and what is missing for the rest."""
