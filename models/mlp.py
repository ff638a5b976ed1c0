"""A multi-layer perceptron on flattened images (Rumelhart, Hinton and Williams, 1986), with ReLU.

The smallest model here: for checking a set-up rather than for accuracy.
"""

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from models import checks
from models.dropout import dropout, split_key
from models.image_classifier import ImageClassifier
from models.initializers import fan_normal
from models.nnx_task import Mode


class MLP(nnx.Module):
    """(rows, ...) -> logits (rows, sizes[-1]); ``sizes`` begins with the number of inputs."""

    def __init__(self, sizes: tuple[int, ...], *, dropout: float, dtype: Any, rngs: nnx.Rngs):
        self.dropout = dropout
        self.layers = nnx.List(
            nnx.Linear(inputs, outputs, kernel_init=fan_normal("in", 2.0), dtype=dtype, rngs=rngs)
            for inputs, outputs in pairwise(sizes[:-1])
        )
        self.head = nnx.Linear(sizes[-2], sizes[-1], kernel_init=fan_normal("in"), dtype=dtype, rngs=rngs)

    def __call__(self, image: jax.Array, mode: Mode) -> jax.Array:
        x = image.reshape(image.shape[0], -1)
        for layer, key in zip(self.layers, split_key(mode.key, len(self.layers)), strict=True):
            x = dropout(jax.nn.relu(layer(x)), self.dropout, key)
        return self.head(x).astype(jnp.float32)


@dataclass(frozen=True, kw_only=True)
class MLPClassifier(ImageClassifier):
    """Hidden layers of the given widths, each followed by ReLU and dropout, then a linear head."""

    hidden: tuple[int, ...] = (256, 256)
    """Widths of the hidden layers; empty for a linear model."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.hidden, list | tuple):
            raise ValueError(f"hidden = {self.hidden!r}: must be a list of whole numbers, such as [256, 256]")
        object.__setattr__(self, "hidden", tuple(self.hidden))  # a TOML array comes as a list, which has no hash
        for position, width in enumerate(self.hidden):
            checks.positive_int(f"hidden[{position}]", width)

    def build(self, rngs: nnx.Rngs) -> MLP:
        sizes = (self.image_size**2 * self.channels, *self.hidden, self.num_classes)
        return MLP(sizes, dropout=self.dropout, dtype=self.dtype, rngs=rngs)
