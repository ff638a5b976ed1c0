"""synthetic: made-up examples of any size, for measuring speed without the cost of reading.

Each is a function of (split, index) alone, and can be learnt: the label follows from the image, and a token from the
two before it.
"""

from dataclasses import dataclass
from typing import Annotated, Literal

import numpy as np
from pydantic import Field

from trainer.data.source import Example, Source, Split
from trainer.errors import SettingsRefused

Count = Annotated[int, Field(gt=0)]

_STREAMS = {"train": 0, "test": 1}


def synthetic(
    *,
    split: Split,
    kind: Literal["image", "tokens"] = "image",
    num_examples: Count = 1024,
    num_test_examples: Annotated[int, Field(ge=0)] = 256,
    image_size: Count = 32,
    channels: Count = 3,
    num_classes: Count = 10,
    seq_len: Count = 128,
    vocab_size: Count = 256,
) -> Source:
    """Returns what ``Images`` or ``Sequences`` says. ``num_examples`` counts the training split.

    Raises SettingsRefused if an image has fewer values than there are classes.
    """
    num = num_examples if split == "train" else num_test_examples
    if kind == "tokens":
        return Sequences(num, _STREAMS[split], seq_len, vocab_size)
    shape = (image_size, image_size, channels)
    if np.prod(shape) < num_classes:
        raise SettingsRefused(f"data.args: an image of shape {shape} is too small to show {num_classes} classes")
    return Images(num, _STREAMS[split], shape, num_classes)


@dataclass(frozen=True)
class Images:
    """``image`` float32 ``shape`` in 0..1 and ``label`` int32 in range(num_classes).

    All values are noise below one half, but for one of ``num_classes`` equal parts of the image, which lies above: the
    label says which.
    """

    num_examples: int
    stream: int
    shape: tuple[int, int, int]
    num_classes: int

    def __len__(self) -> int:
        return self.num_examples

    def __getitem__(self, index: int, /) -> Example:
        size = int(np.prod(self.shape))
        words = _random_words(self.stream, index, 1 + -(-size // 8))
        label = int(words[0] % self.num_classes)
        values = words[1:].view(np.uint8)[:size] >> 1
        values[label * size // self.num_classes : (label + 1) * size // self.num_classes] += 128
        image = values.reshape(self.shape).astype(np.float32) / np.float32(255)
        return {"image": image, "label": np.asarray(label, np.int32)}


@dataclass(frozen=True)
class Sequences:
    """``tokens`` int32 (seq_len + 1,): arithmetic sequences modulo ``vocab_size``, from anywhere, with any stride."""

    num_examples: int
    stream: int
    seq_len: int
    vocab_size: int

    def __len__(self) -> int:
        return self.num_examples

    def __getitem__(self, index: int, /) -> Example:
        start, stride = (int(word % self.vocab_size) for word in _random_words(self.stream, index, 2))
        tokens = (start + stride * np.arange(self.seq_len + 1, dtype=np.int64)) % self.vocab_size
        return {"tokens": tokens.astype(np.int32)}


def _random_words(stream: int, index: int, num: int) -> np.ndarray:
    """``num`` random uint64, always the same for the same stream and index."""
    return np.random.Philox(key=[stream, index]).random_raw(num)
