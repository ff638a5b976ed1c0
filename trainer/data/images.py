"""images: your own image files, a folder for each class."""

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
from PIL import Image, ImageOps
from pydantic import Field

from trainer.data.source import Example, Source, Split
from trainer.data.splits import TestFraction, existing
from trainer.errors import InputRefused

_SUFFIXES = {".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".ppm", ".pgm", ".tif", ".tiff"}

_MODES = {1: "L", 3: "RGB"}

Labelled = tuple[Path, int]


def images(
    *,
    split: Split,
    path: str,
    image_size: Annotated[int, Field(gt=0)],
    channels: Literal[1, 3] = 3,
    test_fraction: TestFraction | None = None,
) -> Source:
    """Returns ``image`` float32 (image_size, image_size, channels) in 0..1 and ``label`` int32.

    Without ``test_fraction``, ``path`` holds the folders ``train`` and, if there is test data, ``test``, and those hold
    a folder a class. With it, ``path`` itself holds the classes, and of each class a fixed random part, chosen by the
    files' names, is for testing. Labels count the training classes in the order of their names.
    Images are scaled so that they cover the square, and cut to its middle.

    Raises InputRefused: missing or empty folders, a test class without training images; when read, a damaged image.
    """
    root = existing(path, "path", is_folder=True)
    if test_fraction is None:
        files = _apart(root, split)
    else:
        files = [f for names in _by_class(root) for f in _part(names, test_fraction, split)]
    return ImageFiles(tuple(files), image_size, channels)


@dataclass(frozen=True)
class ImageFiles:
    """Labelled image files, decoded when they are read."""

    files: tuple[Labelled, ...]
    image_size: int
    channels: int

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int, /) -> Example:
        file, label = self.files[index]
        return {"image": _decode(file, self.image_size, self.channels), "label": np.asarray(label, np.int32)}


def _apart(root: Path, split: Split) -> list[Labelled]:
    """The files of ``root/train`` or ``root/test``, with labels that count the classes of ``root/train``."""
    train, test = root / "train", root / "test"
    if not train.is_dir():
        raise InputRefused(f"{root} has no folder 'train'; if it holds the classes itself, set data.args.test_fraction")
    if split == "train":
        return [labelled for names in _by_class(train) for labelled in names]
    labels = {folder.name: label for label, folder in enumerate(_folders(train))}
    found: list[Labelled] = []
    for folder in _folders(test) if test.is_dir() else []:
        if folder.name not in labels:
            raise InputRefused(f"{folder}: there is no such class in {train}")
        found += [(file, labels[folder.name]) for file in _image_files(folder)]
    return found


def _by_class(root: Path) -> list[list[Labelled]]:
    folders = _folders(root)
    if not folders:
        raise InputRefused(f"{root} has no folders; it must hold one for each class")
    return [[(file, label) for file in _image_files(folder)] for label, folder in enumerate(folders)]


def _part(files: list[Labelled], test_fraction: float, split: Split) -> list[Labelled]:
    """The share of one class's files; the choice hangs on the names, so that it is the same on every machine."""
    num_test = round(len(files) * test_fraction)
    by_hash = sorted(files, key=lambda labelled: hashlib.sha256(labelled[0].name.encode()).digest())
    return sorted(by_hash[:num_test] if split == "test" else by_hash[num_test:])


def _folders(root: Path) -> list[Path]:
    return sorted(folder for folder in root.iterdir() if folder.is_dir() and not folder.name.startswith("."))


def _image_files(folder: Path) -> list[Path]:
    files = (file for file in folder.iterdir() if file.suffix.lower() in _SUFFIXES and not file.name.startswith("."))
    if found := sorted(files):
        return found
    raise InputRefused(f"{folder} holds no images ({', '.join(sorted(_SUFFIXES))}), but stands for a class")


def _decode(file: Path, image_size: int, channels: int) -> np.ndarray:
    try:
        with Image.open(file) as opened:
            upright = ImageOps.exif_transpose(opened).convert(_MODES[channels])
            square = ImageOps.fit(upright, (image_size, image_size), Image.Resampling.BILINEAR)
    except (OSError, SyntaxError, ValueError, EOFError, Image.DecompressionBombError) as error:
        raise InputRefused(f"{file} is no readable image: {error}; repair or remove it") from error
    return np.asarray(square, np.float32).reshape(image_size, image_size, channels) / np.float32(255)
