"""The regions of shared memory that clients may register, as the configuration says."""

from __future__ import annotations

import logging

from service.config.serverconfig import ServerConfig
from service.regions.files import check_system
from service.regions.table import RegionLimits, RegionTable

_log = logging.getLogger(__name__)


def open_regions(config: ServerConfig) -> RegionTable | None:
    """Return the table of regions, or None if shared memory is off.

    Raises ConfigError if the system does not allow shared memory.
    """
    if not config.shared_memory:
        return None
    check_system()
    _log.info(
        "shared memory is on: clients may register files of /dev/shm whose names begin with %r",
        config.region_prefix,
    )
    if not config.region_prefix:
        _log.warning("shared_memory is *: clients may register every file there that this user may read and write")
    return new_table(config)


def new_table(config: ServerConfig) -> RegionTable:
    """Return a table with the configured limits: for another process of a server that has shared memory on."""
    return RegionTable(RegionLimits(config.region_prefix))
