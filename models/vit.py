"""Vision transformer (Dosovitskiy et al., 2021).

Departures: global average pooling is the default (Beyer et al., 2022: as good, and one token fewer), and the head
starts small instead of at zero, so that every parameter has a gradient from the first step on.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from flax import nnx

from models import checks
from models.dropout import dropout, split_key
from models.image_classifier import ImageClassifier
from models.initializers import fan_normal, normal
from models.nnx_task import Mode
from models.transformer import Block, BlockSettings, layer_norm

POOLINGS = ("mean", "cls")


class ViT(nnx.Module):
    """(rows, S, S, C) -> logits (rows, num_classes), from patches of ``patch_size`` squared pixels."""

    def __init__(
        self,
        settings: BlockSettings,
        *,
        grid: int,
        patch_values: int,
        depth: int,
        num_classes: int,
        pooling: str,
        position_std: float,
        rngs: nnx.Rngs,
    ):
        width, dtype = settings.width, settings.dtype
        self.grid, self.dropout, self.dtype = grid, settings.dropout, dtype
        self.embed = nnx.Linear(patch_values, width, kernel_init=fan_normal("in"), dtype=dtype, rngs=rngs)
        self.cls = nnx.Param(jnp.zeros(width)) if pooling == "cls" else None
        small = normal(0.02)
        self.position = nnx.Param(normal(position_std)(rngs.params(), (grid**2 + (pooling == "cls"), width)))
        self.blocks = nnx.List(Block(settings, rngs) for _ in range(depth))
        self.norm = layer_norm(width, dtype, rngs)
        self.head = nnx.Linear(width, num_classes, kernel_init=small, dtype=dtype, rngs=rngs)

    def __call__(self, image: jax.Array, mode: Mode) -> jax.Array:
        first_key, *block_keys = split_key(mode.key, 1 + len(self.blocks))
        x_BxTxD = self.embed(_patches(image, self.grid))
        if self.cls is not None:
            cls = jnp.broadcast_to(self.cls[...].astype(self.dtype), (x_BxTxD.shape[0], 1, x_BxTxD.shape[2]))
            x_BxTxD = jnp.concatenate([cls, x_BxTxD], axis=1)
        x_BxTxD = dropout(x_BxTxD + self.position[...].astype(self.dtype), self.dropout, first_key)
        for block, key in zip(self.blocks, block_keys, strict=True):
            x_BxTxD = block(x_BxTxD, key)
        x_BxTxD = self.norm(x_BxTxD)
        pooled = jnp.mean(x_BxTxD, axis=1) if self.cls is None else x_BxTxD[:, 0]
        return self.head(pooled).astype(jnp.float32)


def _patches(image: jax.Array, grid: int) -> jax.Array:
    """(rows, S, S, C) -> (rows, grid * grid, values of a patch), row by row."""
    rows, size, _, channels = image.shape
    patch = size // grid
    tiles = image.reshape(rows, grid, patch, grid, patch, channels).swapaxes(2, 3)
    return tiles.reshape(rows, grid**2, patch**2 * channels)


@dataclass(frozen=True, kw_only=True)
class ViTClassifier(ImageClassifier):
    """A vision transformer. ViT-B/16: image 224, patch 16, width 768, depth 12, 12 heads, pooling 'cls'."""

    patch_size: int
    width: int
    depth: int
    num_heads: int
    mlp_ratio: float = 4.0
    """Width of the feed-forward layers' middle, as a multiple of width."""
    pooling: str = "mean"
    """mean over all patches, or cls: an extra token's output."""
    position_std: float = 0.02
    """Standard deviation of the initial position embeddings. Small models with few patches learn sooner with more."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("patch_size", "width", "depth", "num_heads"):
            checks.positive_int(name, getattr(self, name))
        checks.positive_number("mlp_ratio", self.mlp_ratio)
        checks.one_of("pooling", self.pooling, POOLINGS)
        checks.positive_number("position_std", self.position_std)
        checks.divides("num_heads", self.num_heads, "width", self.width)
        checks.divides("patch_size", self.patch_size, "image_size", self.image_size)

    def build(self, rngs: nnx.Rngs) -> ViT:
        init = fan_normal("mean")
        settings = BlockSettings(
            width=self.width,
            num_heads=self.num_heads,
            hidden=max(1, round(self.mlp_ratio * self.width)),
            dropout=self.dropout,
            causal=False,
            dtype=self.dtype,
            kernel_init=init,
            output_init=init,
        )
        return ViT(
            settings,
            grid=self.image_size // self.patch_size,
            patch_values=self.patch_size**2 * self.channels,
            depth=self.depth,
            num_classes=self.num_classes,
            pooling=self.pooling,
            position_std=self.position_std,
            rngs=rngs,
        )
