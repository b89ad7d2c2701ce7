"""Fixture: one small archive; tests change copies of it."""

from __future__ import annotations

import exportedfiles
import pytest
import torch
from architectures import Mlp, seeded


@pytest.fixture(scope="session")
def mlp_archive() -> bytes:
    """Return ``architectures.Mlp`` as torch.export.save writes it."""
    return exportedfiles.exported(seeded(Mlp()), torch.ones(2, 16))
