"""Readers, which turn a recognised source into a :class:`~converter.model.Source`: one module per family, with
``read``.
"""
