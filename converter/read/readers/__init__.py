"""Readers, one module per family, whose ``read`` turns a source into a :class:`~converter.source.Source`."""
