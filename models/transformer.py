"""The pre-norm transformer block (Vaswani et al., 2017; norm first as in Xiong et al., 2020), for ViT and GPT.

Shape suffixes: B rows, T positions (Q of queries, K of keys), D width, H heads, N width of a head.
Dropout is applied to what each half of a block adds, not to the attention weights.
"""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from flax.typing import Initializer

from models.dropout import dropout, split_key


class BlockSettings(NamedTuple):
    """What every block of a model has in common.

    kernel_init is for kernels that read the residual stream, output_init for those that write to it.
    """

    width: int
    num_heads: int
    hidden: int
    dropout: float
    causal: bool
    dtype: Any
    kernel_init: Initializer
    output_init: Initializer


class Attention(nnx.Module):
    """Multi-head self-attention, (B, T, D) -> (B, T, D). If causal, position t sees positions 0 … t only."""

    def __init__(self, settings: BlockSettings, rngs: nnx.Rngs):
        self.num_heads, self.causal = settings.num_heads, settings.causal
        width, dtype, init = settings.width, settings.dtype, settings.kernel_init
        self.query = nnx.Linear(width, width, kernel_init=init, dtype=dtype, rngs=rngs)
        self.key = nnx.Linear(width, width, kernel_init=init, dtype=dtype, rngs=rngs)
        self.value = nnx.Linear(width, width, kernel_init=init, dtype=dtype, rngs=rngs)
        self.output = nnx.Linear(width, width, kernel_init=settings.output_init, dtype=dtype, rngs=rngs)

    def __call__(self, x_BxTxD: jax.Array) -> jax.Array:
        B, T, D = x_BxTxD.shape
        heads = (B, T, self.num_heads, D // self.num_heads)
        q_BxQxHxN = self.query(x_BxTxD).reshape(heads) / math.sqrt(heads[-1])
        k_BxKxHxN = self.key(x_BxTxD).reshape(heads)
        v_BxKxHxN = self.value(x_BxTxD).reshape(heads)
        score_BxHxQxK = jnp.einsum("BQHN,BKHN->BHQK", q_BxQxHxN, k_BxKxHxN).astype(jnp.float32)
        if self.causal:
            visible_QxK = jnp.tril(jnp.ones((T, T), bool))
            score_BxHxQxK = jnp.where(visible_QxK, score_BxHxQxK, jnp.finfo(jnp.float32).min)
        share_BxHxQxK = jax.nn.softmax(score_BxHxQxK).astype(v_BxKxHxN.dtype)
        return self.output(jnp.einsum("BHQK,BKHN->BQHN", share_BxHxQxK, v_BxKxHxN).reshape(B, T, D))


class FeedForward(nnx.Module):
    """Two linear layers with GELU (tanh form; Hendrycks and Gimpel, 2016) between them."""

    def __init__(self, settings: BlockSettings, rngs: nnx.Rngs):
        width, hidden, dtype = settings.width, settings.hidden, settings.dtype
        self.expand = nnx.Linear(width, hidden, kernel_init=settings.kernel_init, dtype=dtype, rngs=rngs)
        self.contract = nnx.Linear(hidden, width, kernel_init=settings.output_init, dtype=dtype, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.contract(jax.nn.gelu(self.expand(x)))


class Block(nnx.Module):
    """Attention, then feed-forward, each on normalised input and added to it."""

    def __init__(self, settings: BlockSettings, rngs: nnx.Rngs):
        self.dropout = settings.dropout
        self.attention_norm = layer_norm(settings.width, settings.dtype, rngs)
        self.attention = Attention(settings, rngs)
        self.mlp_norm = layer_norm(settings.width, settings.dtype, rngs)
        self.mlp = FeedForward(settings, rngs)

    def __call__(self, x_BxTxD: jax.Array, key: jax.Array | None) -> jax.Array:
        attention_key, mlp_key = split_key(key, 2)
        x_BxTxD = x_BxTxD + dropout(self.attention(self.attention_norm(x_BxTxD)), self.dropout, attention_key)
        return x_BxTxD + dropout(self.mlp(self.mlp_norm(x_BxTxD)), self.dropout, mlp_key)


def layer_norm(width: int, dtype: Any, rngs: nnx.Rngs) -> nnx.LayerNorm:
    """Layer normalisation (Ba et al., 2016); its moments are float32 in any dtype."""
    return nnx.LayerNorm(width, epsilon=1e-6, dtype=dtype, rngs=rngs)
