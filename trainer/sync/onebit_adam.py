"""1-bit Adam: Adam whose momentum is what the exchange compresses.

Compressing the gradient in front of Adam goes wrong: what a codec drops enters the variance squared, where no error
feedback can take it back. So the gradient is exchanged exactly until the variance has settled; then the variance is
frozen, and what is exchanged is the momentum, in which the gradient is linear. See Tang et al., "1-bit Adam:
communication efficient large-scale training with Adam's convergence speed" (2021), Algorithm 1.

Two things are not as there, where neither moment is corrected for its start at zero. Here both are, as in Adam itself:
the momentum's correction goes on with every update and the variance's stays as it is at the end of the warm-up, so that
nothing jumps when the variance is frozen. And an element whose variance is exactly zero by then, such as an embedding
that was never looked up, stays where it is: it is left out of the exchange, since one bit cannot say zero.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh

from trainer.errors import SettingsRefused
from trainer.sync import codecs
from trainer.sync.codecs.base import Codec
from trainer.sync.state import SyncState
from trainer.sync.transform import all_reduce


class OneBitAdamState(NamedTuple):
    """Adam's state, and the exchange's.

    m, v:     first and second moment, float32 trees like the updates, the same on all replicas; not corrected for
              their start at zero.
    exchange: counts the updates, and has what the codec dropped of the momentum.
    """

    m: Any
    v: Any
    exchange: SyncState


class _Rule(NamedTuple):
    """The numbers of Adam, and for how many updates it is plain Adam."""

    warmup_steps: int
    beta1: float
    beta2: float
    eps: float

    def moments(self, total: Any, state: OneBitAdamState, is_warm: jax.Array) -> tuple[Any, Any]:
        """The next m and v; ``total``: the gradient, or once ``is_warm`` the next m."""
        b1, b2 = self.beta1, self.beta2
        m = jax.tree.map(lambda t, m: jnp.where(is_warm, t, b1 * m + (1 - b1) * t), total, state.m)
        v = jax.tree.map(lambda t, v: jnp.where(is_warm, v, b2 * v + (1 - b2) * jnp.square(t)), total, state.v)
        return m, v

    def direction(self, m: Any, v: Any, num_updates: jax.Array) -> Any:
        """m / (sqrt(v) + eps), both corrected; ``num_updates`` counts this one."""
        first = 1 - self.beta1**num_updates
        second = 1 - self.beta2 ** jnp.minimum(num_updates, self.warmup_steps)
        return jax.tree.map(lambda m, v: m / first / (jnp.sqrt(v / second) + self.eps), m, v)


def onebit_adam(
    mesh: Mesh | None = None,
    *,
    warmup_steps: int,
    beta1: float = 0.9,
    beta2: float = 0.999,
    eps: float = 1e-8,
    codec: str | Codec = "sign",
    codec_args: Mapping[str, Any] | None = None,
    **exchange: Any,
) -> optax.GradientTransformation:
    """Replaces each replica's gradients by 1-bit Adam's direction, the same bits on every one; exchange included.

    The first ``warmup_steps`` updates are Adam's, of gradients that are exchanged exactly, in float32. Later the
    direction is the momentum, as it came out of the compressed exchange, over the root of the variance as it was then;
    zero where the variance is exactly zero. Called as ``all_reduce`` is, in the place of both the exchange and Adam,
    and without clipping in front; it has each leaf's own dtype, to be scaled by the learning rate.

    Gradients that are not finite, on any replica, make it NaN everywhere and leave the state as it was. The state is an
    ``OneBitAdamState``, which ``state_specs``, ``resize``, ``from_pmap`` and ``to_pmap`` know.

    Args:
        mesh: as of ``all_reduce``.
        warmup_steps: updates until the variance is frozen, at least 1: enough for it to have settled, and to have seen
            every element that is to be trained.
        codec: one that sends every element: "sign", or for more bits "bf16", "fp16", "int8", "int4"; or your own.
        codec_args: keywords for a codec that is given by its name.
        exchange: further arguments of ``all_reduce``: ``compress``, ``axes``, ``devices_per_node``, ``reduce``, ….
            Error feedback is always on.

    Raises:
        SettingsRefused: no warm-up; a codec that leaves elements out; error feedback switched off; momentum
            correction, for the momentum is exchanged already; or what ``all_reduce`` refuses.

    >>> mesh = jax.make_mesh((2, 4), ("node", "local"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    >>> optimizer = optax.chain(onebit_adam(mesh, warmup_steps=100), optax.scale_by_learning_rate(1e-3))
    """
    _check(warmup_steps, exchange)
    rule, axes = _Rule(warmup_steps, beta1, beta2, eps), exchange.get("axes", ("node", "local"))
    axes = axes if isinstance(axes, str) else tuple(axes)
    others = {name: value for name, value in exchange.items() if name != "error_feedback"}
    chosen = _every_element(codec, codec_args or {})
    inner = all_reduce(mesh, codec=chosen, warmup_steps=warmup_steps, error_feedback=True, **others)

    def init(params: optax.Params) -> OneBitAdamState:
        def zeros() -> Any:
            return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, jnp.float32), params)

        start: Any = inner.init(params)
        return OneBitAdamState(zeros(), zeros(), start)

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        del params
        assert isinstance(state, OneBitAdamState)
        count = state.exchange.shared["count"]
        is_warm = count >= warmup_steps
        shares = 1 if exchange.get("reduce", "mean") == "mean" else jax.lax.axis_size(axes)

        def to_send(update: jax.Array, m: jax.Array) -> jax.Array:
            gradient = update.astype(jnp.float32)
            return jnp.where(is_warm, beta1 * m / shares + (1 - beta1) * gradient, gradient)

        mask = jax.tree.map(lambda v: ~is_warm | (v > 0), state.v)
        sent: tuple[Any, Any] = inner.update(jax.tree.map(to_send, updates, state.m), state.exchange, mask=mask)
        total, sync = sent
        m, v = rule.moments(total, state, is_warm)
        direction = rule.direction(m, v, count + 1)
        # Of a large gradient the square can overflow, which makes the direction zero, and v infinite for good.
        flags = [jnp.all(jnp.isfinite(leaf)) for leaf in jax.tree.leaves((direction, v))]
        is_finite = jnp.all(jnp.stack([jnp.bool_(True), *flags]))
        after = OneBitAdamState(m, v, sync)
        after = jax.tree.map(lambda new, old: jnp.where(is_finite, new, old), after, state)
        return jax.tree.map(lambda d, u: jnp.where(is_finite, d, jnp.nan).astype(u.dtype), direction, updates), after

    return optax.GradientTransformation(init, update)


def _every_element(codec: str | Codec, args: Mapping[str, Any]) -> Codec:
    """The codec, if it sends every element: elsewhere the momentum would be forgotten."""
    if codec == "none":
        raise SettingsRefused("sync.codec = 'none': onebit_adam compresses its momentum; choose one, such as 'sign'")
    if isinstance(codec, Codec) and args:
        raise SettingsRefused("codec_args are for a codec given by its name; a codec of your own has them already")
    built = codec if isinstance(codec, Codec) else codecs.build(codec, args)
    if built.unit != "element" or built.sparse:
        raise SettingsRefused(
            f"sync.codec = {built.name!r}: onebit_adam needs one that sends every element, such as 'sign' or 'int8', "
            "for what is received becomes the momentum"
        )
    return built


def _check(warmup_steps: int, exchange: Mapping[str, Any]) -> None:
    if not isinstance(warmup_steps, int) or warmup_steps < 1:
        raise SettingsRefused(
            f"sync.warmup_steps = {warmup_steps!r}: onebit_adam freezes the variance learned in the warm-up; "
            "give a number of updates, 1 or more"
        )
    if not exchange.get("error_feedback", True):
        raise SettingsRefused("sync.error_feedback = false: onebit_adam goes wrong without it; leave it out")
    if exchange.get("output_dtype") is not None:
        raise SettingsRefused("output_dtype: onebit_adam's direction has the dtype of the gradient; leave it out")
    if exchange.get("momentum_correction", 0):
        raise SettingsRefused("sync.momentum_correction: onebit_adam exchanges its momentum already; leave it out")
