"""The directory that a run began with, told apart from another that has come to stand in its place. Needs no JAX."""

import errno
import os
from pathlib import Path

from trainer.checkpoint.manifest import is_local

GONE = "the directory is gone"
REPLACED = f"{GONE}, and another stands in its place"


class Anchor:
    """Holds a directory open: as long as it does, no other can come to have the same device and inode.

    An object store has no directories that could be told apart; there it only knows whether something is there.
    """

    def __init__(self, directory: Path) -> None:
        """
        Raises:
            OSError: ``directory`` cannot be opened.
        """
        self._directory = directory
        self._fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY) if is_local(directory) else -1

    def lost(self) -> str:
        """What has become of the directory, in a few words; "" if it is still there, or that cannot be told."""
        try:
            if self._fd < 0:
                return "" if self._directory.is_dir() else GONE
            return "" if os.path.samestat(os.stat(self._directory), os.fstat(self._fd)) else REPLACED
        except OSError as error:
            return GONE if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.ESTALE) else ""

    def close(self) -> None:
        """Lets go of it; may be called twice."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
