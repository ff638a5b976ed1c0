"""Reads a checkpoint with each of some files replaced: ``checkpoint_reader.py CHECKPOINT FILE...``, the bytes on stdin.

A process of its own, for orbax leaves unfinished tasks behind when it cannot read what it finds. Prints a line a file.
"""

import sys
from pathlib import Path

from trainer.checkpoint import reading
from trainer.checkpoint.store import ARRAYS, Checkpoints
from trainer.errors import InputRefused

if __name__ == "__main__":
    checkpoint, content = Path(sys.argv[1]), sys.stdin.buffer.read()
    checkpoints = Checkpoints(checkpoint.parent, create=False)
    for name in sys.argv[2:]:
        original = Path(name).read_bytes()
        Path(name).write_bytes(content)
        told = "read"
        try:
            checkpoints.meta(int(checkpoint.name))
            for item in ARRAYS:
                reading.stored_leaves(checkpoint, item)
                reading.read(checkpoint, item)
        except InputRefused as refusal:
            told = f"refused in {len(str(refusal).splitlines())} line"
        print(told, name)
        Path(name).write_bytes(original)
