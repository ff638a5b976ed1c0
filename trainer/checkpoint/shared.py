"""Whether all processes see the same directory, found out before anything is trained."""

import os
import secrets
import socket
import time
from contextlib import suppress
from pathlib import Path

from trainer import runtime
from trainer.checkpoint.manifest import is_local
from trainer.errors import InputRefused

SEEN_WITHIN_SECONDS = 30.0
"""How long what one host has written may take to be seen by another."""
POLL_SECONDS = 0.1
MARK = ".lockstep-shared-"


def require_shared(directory: Path) -> None:
    """Has every process write a marker into ``directory``, and see everybody's. Every process must call it.

    Raises:
        InputRefused: in all of them alike, the directory cannot be written or is not the same one everywhere.
    """
    nonce = runtime.agree("checkpoint marker", secrets.token_hex(8))[0]
    markers = [directory / f"{MARK}{nonce}-{rank}" for rank in range(runtime.num_processes())]
    mine = markers[runtime.rank()]
    try:
        failures = runtime.agree("checkpoint directory", {"host": socket.gethostname(), "problem": _write(mine)})
        for rank, failure in enumerate(failures):
            if failure["problem"]:
                raise InputRefused(
                    f"checkpoint.directory = {directory} cannot be used: rank {rank} on {failure['host']} cannot write "
                    f"there: {failure['problem']}"
                )
        unseen = runtime.agree("checkpoint markers", _unseen(markers))
        for rank, missing in enumerate(unseen):
            if missing:
                raise InputRefused(
                    f"checkpoint.directory = {directory} is not shared: rank {rank} on {failures[rank]['host']} does "
                    f"not see what rank {missing[0]} on {failures[missing[0]]['host']} wrote there; it must be on a "
                    "file system that all hosts share (checkpoint.directory, --run-dir)"
                )
    finally:
        with suppress(OSError):
            mine.unlink()


def _write(marker: Path) -> str:
    """Writes a marker as a checkpoint is written, down to the disk; returns what went wrong."""
    try:
        with marker.open("wb") as file:
            file.write(b"\n")
            file.flush()
            if is_local(marker):
                os.fsync(file.fileno())
    except OSError as error:
        return error.strerror or str(error)
    return ""


def _unseen(markers: list[Path]) -> list[int]:
    """The ranks whose marker does not come to be seen here in time."""
    deadline = time.monotonic() + SEEN_WITHIN_SECONDS
    while missing := [rank for rank, marker in enumerate(markers) if not marker.exists()]:
        if time.monotonic() > deadline:
            return missing
        time.sleep(POLL_SECONDS)
    return []
