"""Brings a store of an older format up to this one: by copy, so that a kill at any point is safe.

The catalog of each format has a folder of its own. The new one is made complete under another name,
renamed, and only then does the store's identity name the new format, in one atomic step; the old
folder is removed after that. Segments stay as they are: a migration's reader understands them.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from kvstore.tiers.catalog import Catalog, CatalogError, catalog_name
from kvstore.tiers.segment import FORMAT_VERSION

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from kvstore.tiers.file_layer import FileLayer
    from kvstore.tiers.store_directory import StoreHome

    # Reads the catalog folder of an older format and fills a catalog of this one. Raises
    # CatalogError when it is unsound: then the catalog is rebuilt from headers.
    Migration = Callable[[Path, Catalog], None]

log = logging.getLogger("kvstore.tiers.disk")

STAGING_NAME = "catalog.migrating"

# By the format that they read. Format 1 is the first that was released.
MIGRATIONS: dict[int, Migration] = {}


def migrate(home: StoreHome, files: FileLayer, map_bytes: int) -> None:
    """Make the catalog of this format from an older one, if that is what lies there."""
    version = home.identity.format_version
    if version < FORMAT_VERSION:
        log.warning("%s: migrating from format %d to %d", home.first, version, FORMAT_VERSION)
        _copy(home.first, version, files, map_bytes, home.identity.store_uuid)
        home.write_identity(format_version=FORMAT_VERSION)
    files.remove_tree(home.first / STAGING_NAME)
    for older in MIGRATIONS:
        files.remove_tree(home.first / catalog_name(older))


def _copy(
    directory: Path, version: int, files: FileLayer, map_bytes: int, store_uuid: bytes
) -> None:
    staging = directory / STAGING_NAME
    final = directory / catalog_name(FORMAT_VERSION)
    files.remove_tree(staging)
    files.remove_tree(final)
    catalog = Catalog(staging, map_bytes, files)
    try:
        MIGRATIONS[version](directory / catalog_name(version), catalog)
        catalog.put_meta(store_uuid)
    except OSError as error:
        raise CatalogError(f"format {version} cannot be read: {error}") from error
    finally:
        catalog.close()
    files.rename(staging, final)
