"""Deployments that are programs of their own. Their sources are in the folder ``deploy``."""
