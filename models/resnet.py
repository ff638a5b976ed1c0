"""Residual network (He et al., 2016) with batch-norm.

Departures: the stride of a bottleneck is on its 3 x 3 convolution, and the last norm of each block starts at zero, so
that a block begins as its shortcut (Goyal et al., 2017: both help training with large global batches).
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from models import checks
from models.batch_norm import SCOPES, BatchNorm, next_running
from models.dropout import dropout
from models.image_classifier import ImageClassifier
from models.initializers import fan_normal, normal
from models.nnx_task import Mode, PyTree

STAGES = {18: (2, 2, 2, 2), 34: (3, 4, 6, 3), 50: (3, 4, 6, 3)}
"""Depth -> blocks in each stage. From 50 on, blocks are bottlenecks."""
STEMS = ("cifar", "imagenet")


class Layers(NamedTuple):
    """Makes the two kinds of layer that everything here is built from."""

    scope: str
    dtype: Any
    rngs: nnx.Rngs

    def conv(self, inputs: int, outputs: int, size: int, stride: int = 1) -> nnx.Conv:
        """A convolution without bias; its output has ceil(input / stride) pixels a side."""
        return nnx.Conv(
            inputs,
            outputs,
            (size, size),
            strides=stride,
            padding=size // 2,
            use_bias=False,
            kernel_init=fan_normal("out", 2.0),
            dtype=self.dtype,
            rngs=self.rngs,
        )

    def norm(self, features: int, *, zero_scale: bool = False) -> BatchNorm:
        """Batch-norm of the model's scope."""
        return BatchNorm(features, scope=self.scope, zero_scale=zero_scale, dtype=self.dtype)


class Block(nnx.Module):
    """The block of a model of that depth, for (rows, S, S, inputs): two convolutions, or three, added to a shortcut."""

    def __init__(self, layers: Layers, inputs: int, depth: int, width: int, stride: int):
        if depth < 50:
            self.features = width
            self.convs = nnx.List([layers.conv(inputs, width, 3, stride), layers.conv(width, width, 3)])
            norms = [layers.norm(width)]
        else:
            self.features = 4 * width
            convs = [layers.conv(inputs, width, 1), layers.conv(width, width, 3, stride)]
            self.convs = nnx.List([*convs, layers.conv(width, self.features, 1)])
            norms = [layers.norm(width), layers.norm(width)]
        self.norms = nnx.List([*norms, layers.norm(self.features, zero_scale=True)])
        self.has_projection = stride > 1 or inputs != self.features
        if self.has_projection:
            self.shortcut = layers.conv(inputs, self.features, 1, stride)
            self.shortcut_norm = layers.norm(self.features)

    def __call__(self, x: jax.Array, mode: Mode) -> jax.Array:
        shortcut = self.shortcut_norm(self.shortcut(x), mode) if self.has_projection else x
        for position, (conv, norm) in enumerate(zip(self.convs, self.norms, strict=True)):
            x = norm(conv(jax.nn.relu(x) if position else x), mode)
        return jax.nn.relu(x + shortcut)


class ResNet(nnx.Module):
    """(rows, S, S, C) -> logits (rows, num_classes)."""

    def __init__(
        self, layers: Layers, *, depth: int, stem: str, width: int, channels: int, num_classes: int, dropout: float
    ):
        self.dropout, self.pool = dropout, stem == "imagenet"
        self.stem = layers.conv(channels, width, 7, 2) if self.pool else layers.conv(channels, width, 3)
        self.stem_norm = layers.norm(width)
        blocks, features = [], width
        for stage, num_blocks in enumerate(STAGES[depth]):
            for position in range(num_blocks):
                stride = 2 if stage > 0 and position == 0 else 1
                blocks.append(Block(layers, features, depth, width * 2**stage, stride))
                features = blocks[-1].features
        self.blocks = nnx.List(blocks)
        small = normal(0.01)
        self.head = nnx.Linear(features, num_classes, kernel_init=small, dtype=layers.dtype, rngs=layers.rngs)

    def __call__(self, image: jax.Array, mode: Mode) -> jax.Array:
        x = jax.nn.relu(self.stem_norm(self.stem(image), mode))
        if self.pool:
            x = _max_pool(x)
        for block in self.blocks:
            x = block(x, mode)
        pooled = dropout(jnp.mean(x, axis=(1, 2)), self.dropout, mode.key)
        return self.head(pooled).astype(jnp.float32)


def _max_pool(x: jax.Array) -> jax.Array:
    """The largest of each 3 x 3 pixels, in steps of 2: half as many pixels a side."""
    around = ((0, 0), (1, 1), (1, 1), (0, 0))
    return jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, (1, 3, 3, 1), (1, 2, 2, 1), around)


@dataclass(frozen=True, kw_only=True)
class ResNetClassifier(ImageClassifier):
    """ResNet-18, -34 or -50. Dropout acts on the pooled features."""

    depth: int = 18
    stem: str = "cifar"
    """cifar: a 3 x 3 convolution, for small images; imagenet: 7 x 7 with stride 2, then max-pooling."""
    width: int = 64
    """Channels of the first stage; each later stage has twice as many."""
    batch_norm_scope: str = "global"
    """global: moments over all replicas; virtual_replica: within one, independent of the number of devices."""
    batch_norm_momentum: float = 0.9
    """Share of the old running statistics that is kept at each step."""

    def __post_init__(self) -> None:
        super().__post_init__()
        checks.one_of("depth", self.depth, STAGES)
        checks.one_of("stem", self.stem, STEMS)
        checks.positive_int("width", self.width)
        checks.one_of("batch_norm_scope", self.batch_norm_scope, SCOPES)
        checks.fraction("batch_norm_momentum", self.batch_norm_momentum)

    def build(self, rngs: nnx.Rngs) -> ResNet:
        return ResNet(
            Layers(self.batch_norm_scope, self.dtype, rngs),
            depth=self.depth,
            stem=self.stem,
            width=self.width,
            channels=self.channels,
            num_classes=self.num_classes,
            dropout=self.dropout,
        )

    def next_model_state(self, model_state: PyTree, statistics: PyTree) -> PyTree:
        """Running means and variances after a step; unchanged if nothing in the global batch had weight."""
        return next_running(model_state, statistics, self.batch_norm_momentum)
