"""The disk of a worker's file tier, claimed before the worker is built."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from common.pages import KVLayout
from kvtransfer.transport import TransferError
from worker.tier.file_blocks import FileBlocks
from worker.tier.kv_files import KVFiles
from worker.tier.ranks.asking import Ask, FurtherFiles, common_files
from worker.tier.ranks.questions import Room
from worker.tier.settings import DiskSettings

log = logging.getLogger("baton.tier")


@dataclass(frozen=True, slots=True)
class Disk:
    """A claimed folder, and the files that were found in it."""

    files: KVFiles
    blocks: FileBlocks

    @classmethod
    def claim(cls, settings: DiskSettings, layout: KVLayout, ask: Ask | None = None) -> Disk | None:
        """Claim a folder and read what it has; not on an event loop, since many files take long on a slow disk.

        `ask`: further ranks claim theirs, and each gets an equal part of the bytes.

        None where the directory can't be used, since it is for hits alone.
        """
        try:
            files = KVFiles.claim(settings.directory, layout)
            found = files.scan()
            if ask is not None:
                common = common_files(ask, files.folder, found)
                files.remove((digest, stored) for digest, stored in found.items() if digest not in common)
                found = common
            blocks = FileBlocks(settings.num_bytes // (1 if ask is None else 1 + ask.num_ranks), found)
        except (OSError, TransferError) as error:
            log.warning("tier.no_files", extra={"directory": str(settings.directory), "error": str(error)})
            return None
        gone = blocks.make_room(0)
        files.remove(gone)
        if ask is not None and gone:
            FurtherFiles(ask, Room(0)).remove(gone)
        return cls(files, blocks)
