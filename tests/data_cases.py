"""Data for the tests of the sources: small files of every kind, and one case for every source."""

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from array_record.python.array_record_module import ArrayRecordWriter
from PIL import Image

from trainer.config import Data
from trainer.data import Source, Split, open_source
from trainer.errors import LockstepError

Args = dict[str, Any]

Case = Callable[[Path], tuple[str, Args]]
"""Writes the data under a folder and returns what to put into the settings: source and args."""


def opened(source: str, args: Args, split: Split = "train") -> Source:
    return open_source(Data.model_validate({"source": source, "global_batch": 8, "args": args}), split)


def refusal(source: str, args: Args, split: Split = "train", read: bool = False) -> str:
    """What opening, or reading, is refused with: always one line."""
    with pytest.raises(LockstepError) as refused:
        told(opened(source, args, split), limit=None if read else 0)
    assert "\n" not in str(refused.value)
    return f"{type(refused.value).__name__}: {refused.value}"


def told(source: Source, limit: int | None = None) -> list[tuple[tuple[str, bytes], ...]]:
    """All examples, or the first ``limit``, as something that can be compared and kept in a set."""
    chosen = range(len(source))[:limit]
    return [tuple((name, np.asarray(value).tobytes()) for name, value in source[i].items()) for i in chosen]


def write_npz(path: Path, **arrays: np.ndarray) -> str:
    np.savez(path, allow_pickle=True, **arrays)
    return str(path)


def write_image(path: Path, value: int, size: tuple[int, int] = (6, 4), mode: str = "RGB") -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new(mode, size, (value, 0, 255) if mode == "RGB" else value).save(path)


def write_records(path: Path, records: list[bytes]) -> str:
    writer = ArrayRecordWriter(str(path), "group_size:1")
    for record in records:
        writer.write(record)
    writer.close()
    return str(path)


def archive(**arrays: np.ndarray) -> bytes:
    buffer = io.BytesIO()
    np.savez(buffer, allow_pickle=True, **arrays)
    return buffer.getvalue()


def digits_case(_: Path) -> tuple[str, Args]:
    return "digits", {}


def text_case(_: Path) -> tuple[str, Args]:
    return "text", {"seq_len": 64, "max_bytes": 5000}


def npz_case(folder: Path) -> tuple[str, Args]:
    rng = np.random.default_rng(0)
    path = write_npz(folder / "a.npz", x=rng.normal(size=(20, 3)).astype(np.float32), label=np.arange(20))
    return "npz", {"path": path, "test_fraction": 0.25}


def npz_apart_case(folder: Path) -> tuple[str, Args]:
    return "npz", {
        "path": write_npz(folder / "a.npz", x=np.arange(12)),
        "test_path": write_npz(folder / "b.npz", x=np.arange(12, 20)),
    }


def tokens_case(folder: Path) -> tuple[str, Args]:
    np.save(folder / "tokens.npy", np.arange(1000, dtype=np.uint16))
    return "tokens", {"path": str(folder / "tokens.npy"), "seq_len": 16, "test_fraction": 0.2}


def tokens_raw_case(folder: Path) -> tuple[str, Args]:
    np.arange(500, dtype="<u4").tofile(folder / "a.bin")
    np.arange(500, 900, dtype="<u4").tofile(folder / "b.bin")
    paths = {"path": str(folder / "a.bin"), "test_path": str(folder / "b.bin")}
    return "tokens", {**paths, "seq_len": 16, "dtype": "uint32"}


def images_case(folder: Path) -> tuple[str, Args]:
    for number in range(20):
        write_image(folder / ("cat" if number % 2 else "dog") / f"{number}.png", 10 * number)
    return "images", {"path": str(folder), "image_size": 4, "test_fraction": 0.2}


def images_apart_case(folder: Path) -> tuple[str, Args]:
    for number in range(20):
        write_image(
            folder / ("test" if number < 4 else "train") / ("a" if number % 2 else "b") / f"{number}.jpg", number
        )
    return "images", {"path": str(folder), "image_size": 4}


def arrayrecord_case(folder: Path) -> tuple[str, Args]:
    for part in range(2):
        rows = [archive(x=np.arange(3, dtype=np.float32) + 10 * part + i) for i in range(5)]
        write_records(folder / f"train-{part}.arrayrecord", rows)
    test = write_records(folder / "test.arrayrecord", [archive(x=np.full(3, -1.0, np.float32) - i) for i in range(4)])
    return "arrayrecord", {"path": str(folder / "train-*.arrayrecord"), "test_path": test}


def synthetic_images_case(_: Path) -> tuple[str, Args]:
    return "synthetic", {"num_examples": 40, "num_test_examples": 10, "image_size": 5, "channels": 1}


def synthetic_tokens_case(_: Path) -> tuple[str, Args]:
    return "synthetic", {"kind": "tokens", "num_examples": 40, "num_test_examples": 10, "seq_len": 9}


CASES: list[Case] = [
    digits_case,
    text_case,
    npz_case,
    npz_apart_case,
    tokens_case,
    tokens_raw_case,
    images_case,
    images_apart_case,
    arrayrecord_case,
    synthetic_images_case,
    synthetic_tokens_case,
]
