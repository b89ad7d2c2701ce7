"""How a recognised source becomes a :class:`~converter.model.Source`: one module a family, each with ``read``."""
