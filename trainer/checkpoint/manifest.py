"""What makes a checkpoint complete: ``manifest.json``, which lists its files with sizes and checksums, written last.

A checkpoint without one was never finished. Nothing read here is executed: it is JSON, and bytes that are counted.
"""

import json
import os
import stat
import time
import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from trainer.rundir import write_text

NAME = "manifest.json"
FORMAT_VERSION = 2
"""Of a checkpoint as a whole. A version of Lockstep reads its own format only; whatever changes the items, or what they
mean, raises it. Format 1 had no manifest."""

CHUNK_BYTES = 1 << 22
NUM_THREADS = 4
IGNORED = (".nfs",)
"""Beginnings of names that a network file system makes of files which are still open somewhere."""


class File(NamedTuple):
    """A file's size in bytes and CRC-32, which notices any damage within 32 neighbouring bits, and nearly all other."""

    num_bytes: int
    crc32: int


class Manifest(NamedTuple):
    """What a complete checkpoint says of itself.

    step:         batches consumed.
    run_id:       the run that wrote it, see ``RunDir.id``; "" if nobody said.
    seconds:      when it was completed, since 1970.
    files:        by path within the checkpoint.
    """

    step: int
    run_id: str
    seconds: float
    files: dict[str, File]
    format_version: int = FORMAT_VERSION

    @property
    def num_bytes(self) -> int:
        """The size of all files together."""
        return sum(file.num_bytes for file in self.files.values())


class Damaged(Exception):
    """A checkpoint that is not what its manifest says; the message says how, after the checkpoint's path."""


def write(directory: Path, step: int, run_id: str) -> Manifest:
    """Makes the checkpoint in ``directory`` complete: all its files must be there.

    Raises:
        OSError: a file cannot be read, or the manifest cannot be written.
        Damaged: it holds a link.
    """
    files = {name: size for name, size in _sizes(directory) if name != NAME}
    with ThreadPoolExecutor(NUM_THREADS) as pool:
        sums = list(pool.map(lambda name: checksum(directory / name), files))
    listed = {name: File(size, crc) for (name, size), crc in zip(files.items(), sums, strict=True)}
    manifest = Manifest(step, run_id, time.time(), listed)
    text = _dumps(manifest)
    if is_local(directory):
        write_text(directory / NAME, text)
        sync_directory(directory)
    else:
        (directory / NAME).write_text(text)  # an object store puts an object whole or not at all
    return manifest


def read(directory: Path) -> Manifest | None:
    """The manifest of the checkpoint in ``directory``; None if it has none.

    Raises:
        Damaged: it cannot be read, or is not as it was written.
    """
    path = directory / NAME
    try:
        if path.exists() and not path.is_file():  # reading a pipe would wait for ever
            raise Damaged(f"{NAME} is no regular file")
        content = path.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise Damaged(f"{NAME} cannot be read: {error.strerror or error}") from None
    try:
        tree = json.loads(content)
        files = {name: File(*map(int, pair)) for name, pair in tree["files"].items()}
        numbers = int(tree["step"]), str(tree["run_id"]), float(tree["seconds"])
        manifest = Manifest(*numbers, files, int(tree["format_version"]))
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        raise Damaged(f"{NAME} is damaged: it is not what Lockstep writes") from None
    if _dumps(manifest).encode() != content and manifest.format_version == FORMAT_VERSION:
        raise Damaged(f"{NAME} is damaged: its own checksum is wrong")
    return manifest


def check(directory: Path, manifest: Manifest, *, checksums: bool) -> None:
    """Compares the files in ``directory`` with ``manifest``: always their names and sizes, and where asked every byte.

    Raises:
        Damaged: names the first file that differs.
    """
    try:
        found = {name: size for name, size in _sizes(directory) if name != NAME}
        _compare(found, manifest.files)
        if checksums:
            with ThreadPoolExecutor(NUM_THREADS) as pool:
                sums = pool.map(lambda name: checksum(directory / name), manifest.files)
                for (name, file), crc in zip(manifest.files.items(), sums, strict=True):
                    if crc != file.crc32:
                        raise Damaged(f"{name} has changed: its checksum is wrong")
    except OSError as error:
        raise Damaged(f"it cannot be read: {error.strerror or error}") from None


def checksum(path: Path) -> int:
    """The CRC-32 of a file's bytes."""
    crc = 0
    with path.open("rb") as file:
        while chunk := file.read(CHUNK_BYTES):
            crc = zlib.crc32(chunk, crc)
    return crc


def is_local(path: Any) -> bool:
    """Whether ``path`` is on a file system, and not in an object store."""
    return "://" not in str(path)


def sync_directory(path: Path) -> None:
    """Has the names in a directory survive a power cut, where the file system can promise that."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _dumps(manifest: Manifest) -> str:
    """The file's whole text, its own checksum included."""
    tree = manifest._asdict()
    body = json.dumps(tree, sort_keys=True)
    return json.dumps({**tree, "checksum": zlib.crc32(body.encode())}, indent=1, sort_keys=True) + "\n"


def _compare(found: dict[str, int], listed: dict[str, File]) -> None:
    for name, file in listed.items():
        if name not in found:
            raise Damaged(f"{name} is missing")
        if found[name] != file.num_bytes:
            raise Damaged(f"{name} has {found[name]} bytes instead of {file.num_bytes}")
    if unlisted := sorted(found.keys() - listed.keys()):
        raise Damaged(f"it holds {unlisted[0]}, which its manifest does not list")


def _sizes(directory: Path, below: str = "") -> Iterator[tuple[str, int]]:
    """The path within the checkpoint and the size of each file.

    Raises:
        Damaged: there is a link, which may lead anywhere, or another thing that is neither file nor directory.
    """
    for entry in sorted(directory.iterdir()):
        name = f"{below}{entry.name}"
        if entry.name.startswith(IGNORED):
            continue
        if is_local(entry):
            info = os.lstat(entry)
            if stat.S_ISDIR(info.st_mode):
                yield from _sizes(entry, f"{name}/")
            elif stat.S_ISREG(info.st_mode):
                yield name, info.st_size
            else:
                kind = "a symbolic link" if stat.S_ISLNK(info.st_mode) else "no file and no directory"
                raise Damaged(f"{name} is {kind}, which a checkpoint never holds")
        elif entry.is_dir():
            yield from _sizes(entry, f"{name}/")
        else:
            yield name, entry.stat().length  # pyright: ignore[reportAttributeAccessIssue] # epath's own
