"""The disk of a worker's file tier, claimed before the worker is built."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from common.pages import KVLayout
from worker.tier.file_blocks import FileBlocks
from worker.tier.kv_files import KVFiles
from worker.tier.settings import DiskSettings

log = logging.getLogger("baton.tier")


@dataclass(frozen=True, slots=True)
class Disk:
    """A claimed folder, and the files that were found in it."""

    files: KVFiles
    blocks: FileBlocks

    @classmethod
    def claim(cls, settings: DiskSettings, layout: KVLayout) -> Disk | None:
        """Claim a folder and read what it has; not on an event loop, since many files take long on a slow disk.

        None where the directory can't be used, since it is for hits alone.
        """
        try:
            files = KVFiles.claim(settings.directory, layout)
            blocks = FileBlocks(settings.num_bytes, files.scan())
        except OSError as error:
            log.warning("tier.no_files", extra={"directory": str(settings.directory), "error": str(error)})
            return None
        files.remove(blocks.make_room(0))
        return cls(files, blocks)
