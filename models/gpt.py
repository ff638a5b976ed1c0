"""Decoder-only language model (GPT-2: Radford et al., 2019), with learned positions.

Batches hold ``tokens`` (rows, T + 1) int32: position t predicts tokens[:, t + 1]. An optional ``mask`` (rows, T)
float32 says which targets count. The weight of a batch is its number of counted targets.
"""

import math
from dataclasses import dataclass
from functools import cached_property

import jax
import jax.numpy as jnp
from flax import nnx

from models import checks
from models.dropout import dropout, split_key
from models.initializers import normal
from models.losses import correct_sum, cross_entropy_sum
from models.nnx_task import Batch, LossParts, Mode, PureModule, PyTree, Sums, clear_padding, require_names
from models.transformer import Block, BlockSettings, layer_norm


class Decoder(nnx.Module):
    """Tokens (rows, T) -> logits (rows, T, vocab_size) that depend on tokens 0 … t only; T <= context_length."""

    def __init__(
        self, settings: BlockSettings, *, vocab_size: int, context_length: int, depth: int, tied: bool, rngs: nnx.Rngs
    ):
        width, dtype, init = settings.width, settings.dtype, settings.kernel_init
        self.dropout, self.dtype = settings.dropout, dtype
        self.embed = nnx.Embed(vocab_size, width, embedding_init=init, dtype=dtype, rngs=rngs)
        self.position = nnx.Param(init(rngs.params(), (context_length, width)))
        self.blocks = nnx.List(Block(settings, rngs) for _ in range(depth))
        self.norm = layer_norm(width, dtype, rngs)
        self.head = (
            None if tied else nnx.Linear(width, vocab_size, use_bias=False, kernel_init=init, dtype=dtype, rngs=rngs)
        )

    def __call__(self, tokens_BxT: jax.Array, mode: Mode) -> jax.Array:
        first_key, *block_keys = split_key(mode.key, 1 + len(self.blocks))
        position_TxD = self.position[: tokens_BxT.shape[1]].astype(self.dtype)
        x_BxTxD = dropout(self.embed(tokens_BxT) + position_TxD, self.dropout, first_key)
        for block, key in zip(self.blocks, block_keys, strict=True):
            x_BxTxD = block(x_BxTxD, key)
        x_BxTxD = self.norm(x_BxTxD)
        logits = self.embed.attend(x_BxTxD) if self.head is None else self.head(x_BxTxD)
        return logits.astype(jnp.float32)


@dataclass(frozen=True, kw_only=True)
class GPT:
    """A language-model task. GPT-2 small: vocab 50257, context 1024, width 768, depth 12, 12 heads."""

    vocab_size: int
    context_length: int
    """Longest sequence of inputs; a batch has one token more in a row."""
    width: int
    depth: int
    num_heads: int
    mlp_ratio: float = 4.0
    """Width of the feed-forward layers' middle, as a multiple of width."""
    dropout: float = 0.0
    """Probability with which a unit is dropped in training."""
    tie_embeddings: bool = True
    """The output layer is the token embedding, transposed (Press and Wolf, 2017)."""
    compute_dtype: str = "float32"
    """float32 or bfloat16: of activations. Parameters, logits and losses are float32 in either."""

    def __post_init__(self) -> None:
        for name in ("vocab_size", "context_length", "width", "depth", "num_heads"):
            checks.positive_int(name, getattr(self, name))
        checks.positive_number("mlp_ratio", self.mlp_ratio)
        checks.fraction("dropout", self.dropout)
        checks.flag("tie_embeddings", self.tie_embeddings)
        checks.one_of("compute_dtype", self.compute_dtype, checks.COMPUTE_DTYPES)
        checks.divides("num_heads", self.num_heads, "width", self.width)

    def build(self, rngs: nnx.Rngs) -> Decoder:
        settings = BlockSettings(
            width=self.width,
            num_heads=self.num_heads,
            hidden=max(1, round(self.mlp_ratio * self.width)),
            dropout=self.dropout,
            causal=True,
            dtype=checks.COMPUTE_DTYPES[self.compute_dtype],
            kernel_init=normal(0.02),
            # 2 * depth layers add to the residual stream; this keeps its variance independent of depth.
            output_init=normal(0.02 / math.sqrt(2 * self.depth)),
        )
        return Decoder(
            settings,
            vocab_size=self.vocab_size,
            context_length=self.context_length,
            depth=self.depth,
            tied=self.tie_embeddings,
            rngs=rngs,
        )

    def init(self, key: jax.Array) -> tuple[PyTree, PyTree]:
        """Returns fresh ``(params, {})``, which depend on ``key`` alone."""
        return self._module.init(key)

    def weight(self, batch: Batch) -> jax.Array:
        """The number of target tokens that count."""
        return jnp.sum(_target_weight(batch))

    def loss(
        self, params: PyTree, model_state: PyTree, batch: Batch, *, key: jax.Array, axes: tuple[str, ...]
    ) -> tuple[jax.Array, LossParts]:
        """The cross-entropy in nats, summed over all target tokens that count."""
        logits, targets, weight = self._predict(params, model_state, batch, Mode(key))
        return cross_entropy_sum(logits, targets, weight)[0], LossParts({}, ())

    def next_model_state(self, model_state: PyTree, statistics: PyTree) -> PyTree:
        """There is no state."""
        return model_state

    def evaluate(self, params: PyTree, model_state: PyTree, batch: Batch) -> Sums:
        """Loss and next-token accuracy in inference mode, a token each."""
        parts = self._predict(params, model_state, batch, Mode())
        return {"loss": cross_entropy_sum(*parts), "accuracy": correct_sum(*parts)}

    @cached_property
    def _module(self) -> PureModule[Decoder]:
        return PureModule(self.build)

    def _predict(
        self, params: PyTree, model_state: PyTree, batch: Batch, mode: Mode
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Logits (rows, T, vocab_size), targets (rows, T) and their weight (rows, T)."""
        require_names(batch, "tokens", "weight")
        length = batch["tokens"].shape[1] - 1
        if not 1 <= length <= self.context_length:
            raise ValueError(
                f"rows of {length + 1} tokens, but task.args.context_length = {self.context_length} allows 2 to"
                f" {self.context_length + 1}: change it, or the length in [data.args]"
            )
        tokens = clear_padding(batch["tokens"], batch["weight"])
        logits = self._module.bind(params, model_state)(tokens[:, :-1], mode)
        return logits, tokens[:, 1:], _target_weight(batch)


def _target_weight(batch: Batch) -> jax.Array:
    """(rows, T) float32: a row's weight, times the mask if there is one; 0 throughout a padding row."""
    tokens, weight = batch["tokens"], batch["weight"]
    mask = batch["mask"] if "mask" in batch else jnp.ones((tokens.shape[0], tokens.shape[1] - 1), jnp.float32)
    return clear_padding(mask, weight) * weight[:, None]
