"""From settings to one optax chain: clip, optimizer with decoupled weight decay, moving average of the parameters.

Also which parameters are trained at all. A frozen tree is split in two, each part with None where the other has its
leaves; JAX takes None for an empty subtree, so that everything here works on either part as it is.
"""

import difflib
from collections.abc import Callable, Sequence
from fnmatch import fnmatchcase
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import optax

from trainer import import_path
from trainer.config import Optimizer
from trainer.errors import SettingsRefused
from trainer.task import PyTree

UNDECAYED_NAMES = ("bias", "scale")
"""Last names of parameters that weight decay leaves alone whatever their shape."""

Tree = TypeVar("Tree")


def build(settings: Optimizer, num_steps: int, params: PyTree) -> optax.GradientTransformationExtraArgs:
    """The optimizer that ``settings`` describe, for gradients that were exchanged already.

    params: what will be trained, as arrays or ``jax.ShapeDtypeStruct``; only paths and shapes are read.

    ``update`` needs ``params``, and may be given the gradient's global norm as ``norm``. Every counter in the state
    counts updates, and the first update uses ``schedule(0)``. Weight decay is decoupled (Loshchilov and Hutter,
    2019) for every optimizer: it adds -learning_rate * weight_decay * parameter to the update, past momentum and
    moments, and only where ``decay_mask`` says so; lamb alone puts it inside its trust ratio, as its paper does.
    Raises SettingsRefused for an import path that gives no optimizer.
    """
    rate = schedule(settings, num_steps)
    mask = decay_mask(params)
    stages = [
        _NAMED[settings.name](settings, rate, mask) if settings.name in _NAMED else _imported(settings, rate, mask)
    ]
    if settings.clip_norm != float("inf"):
        stages.insert(0, clip_by_global_norm(settings.clip_norm))
    if settings.ema_decay:
        stages.append(parameter_ema(settings.ema_decay))
    return optax.with_extra_args_support(optax.chain(*stages))


def schedule(settings: Optimizer, num_steps: int) -> optax.Schedule:
    """The learning rate, float32, as a function of the number of updates made before this one.

    It rises linearly from 0 at update 0 to ``learning_rate`` at update ``warmup_steps``, as optax's own schedules do: a
    first update with warm-up only fills the moments. Then it stays there, or falls on a line or a half cosine
    (Loshchilov and Hutter, 2017) to ``final_fraction * learning_rate``, reached after ``num_steps`` updates and kept.

    >>> rate = schedule(Optimizer(learning_rate=1.0, schedule="linear", warmup_steps=2), num_steps=6)
    >>> [float(rate(count)) for count in range(8)]
    [0.0, 0.5, 1.0, 0.75, 0.5, 0.25, 0.0, 0.0]
    """
    warmup, peak, final = settings.warmup_steps, settings.learning_rate, settings.final_fraction
    falling = {
        "constant": lambda done: jnp.ones_like(done),
        "linear": lambda done: 1.0 - (1.0 - final) * done,
        "cosine": lambda done: final + (1.0 - final) * 0.5 * (1.0 + jnp.cos(jnp.pi * done)),
    }[settings.schedule]

    def learning_rate(count: jax.typing.ArrayLike) -> jax.Array:
        updates = jnp.asarray(count).astype(jnp.float32)
        done = jnp.clip((updates - warmup) / max(num_steps - warmup, 1), 0.0, 1.0)
        return peak * jnp.where(updates < warmup, updates / max(warmup, 1), falling(done))

    return learning_rate


def decay_mask(params: PyTree) -> PyTree:
    """True where weight decay applies: two or more dims, and a last name that is neither 'bias' nor 'scale'.

    The name matters beside the shape because the biases of an attention layer have two dims.
    """
    return jax.tree_util.tree_map_with_path(
        lambda path, leaf: leaf.ndim >= 2 and _name(path).rpartition("/")[2] not in UNDECAYED_NAMES, params
    )


def global_norm(tree: PyTree) -> jax.Array:
    """The 2-norm of all leaves together, as a float32 scalar; squares are taken and summed in float32.

    Not finite if any entry is not, and also from about 1.8e19 on, where float32 cannot hold the square.
    """
    squares = [jnp.sum(jnp.square(jnp.abs(leaf).astype(jnp.float32))) for leaf in jax.tree.leaves(tree)]
    return jnp.sqrt(sum(squares, start=jnp.zeros((), jnp.float32)))


def clip_by_global_norm(limit: float) -> optax.GradientTransformationExtraArgs:
    """Scales all updates by ``limit / norm`` where their global norm is above ``limit``.

    ``update`` takes the norm as the keyword ``norm`` from a caller who knows it already.

    Unlike optax's it measures in float32, so that half precision does not overflow to a step of zeros; gives zeros, not
    NaN, for zeros with a limit of 0; and turns updates whose norm is not finite into NaN, which a check can see.
    """

    def update(
        updates: optax.Updates,
        state: optax.OptState,
        params: optax.Params | None = None,
        *,
        norm: jax.Array | None = None,
        **others: Any,
    ) -> tuple[optax.Updates, optax.OptState]:
        del params, others
        norm = global_norm(updates) if norm is None else norm
        shrink = limit / jnp.where(norm > limit, norm, 1.0)
        scale = jnp.where(jnp.isfinite(norm), jnp.where(norm > limit, shrink, 1.0), jnp.nan)
        return jax.tree.map(lambda leaf: (leaf.astype(jnp.float32) * scale).astype(leaf.dtype), updates), state

    return optax.GradientTransformationExtraArgs(lambda params: optax.EmptyState(), update)


class DecoupledDecayState(NamedTuple):
    """num_updates: updates made, int32."""

    num_updates: jax.Array


def decoupled_decay(weight_decay: float, rate: optax.Schedule, mask: PyTree) -> optax.GradientTransformation:
    """Adds ``-rate(num_updates) * weight_decay * parameter`` to finished updates where ``mask`` is True."""

    def update(
        updates: optax.Updates, state: optax.OptState, params: optax.Params | None = None
    ) -> tuple[optax.Updates, optax.OptState]:
        assert isinstance(state, DecoupledDecayState)
        factor = -weight_decay * rate(state.num_updates)

        def decayed(leaf: jax.Array, decays: bool, param: jax.Array) -> jax.Array:
            if not decays:
                return leaf
            return (leaf.astype(jnp.float32) + factor * param.astype(jnp.float32)).astype(leaf.dtype)

        return jax.tree.map(decayed, updates, mask, _given(params)), DecoupledDecayState(state.num_updates + 1)

    return optax.GradientTransformation(lambda params: DecoupledDecayState(jnp.zeros((), jnp.int32)), update)


class ParameterEmaState(NamedTuple):
    """ema_params: the moving average, shaped like the parameters, float32 at least."""

    ema_params: PyTree


def parameter_ema(decay: float) -> optax.GradientTransformation:
    """Keeps ``ema = decay * ema + (1 - decay) * (parameters after this update)``; comes last and changes no update.

    It starts from the initial parameters, which keep the weight ``decay ** updates``: choose ``1 / (1 - decay)`` well
    below the length of the run. Held in float32 also for half-precision parameters, where small changes would be lost.
    """

    def init(params: optax.Params) -> ParameterEmaState:
        # A copy, so that donating the parameters' buffers leaves the average alone.
        return ParameterEmaState(jax.tree.map(lambda leaf: jnp.array(leaf, _wide(leaf), copy=True), params))

    def update(
        updates: optax.Updates, state: optax.OptState, params: optax.Params | None = None
    ) -> tuple[optax.Updates, optax.OptState]:
        assert isinstance(state, ParameterEmaState)
        after = optax.apply_updates(_given(params), updates)
        averaged = jax.tree.map(
            lambda ema, leaf: decay * ema + (1.0 - decay) * leaf.astype(ema.dtype), state.ema_params, after
        )
        return updates, ParameterEmaState(averaged)

    return optax.GradientTransformation(init, update)


def ema_params(opt_state: optax.OptState) -> PyTree | None:
    """The moving average of the parameters, wherever in ``opt_state`` it is; None if it is not kept."""
    states = jax.tree.leaves(opt_state, is_leaf=lambda node: isinstance(node, ParameterEmaState))
    return next((state.ema_params for state in states if isinstance(state, ParameterEmaState)), None)


def trainable_mask(params: PyTree, patterns: Sequence[str]) -> PyTree:
    """True for the parameters that are trained: those whose path 'a/b/c' matches none of ``patterns`` (shell style, '*'
    also matches '/', case counts). Raises SettingsRefused for patterns that match nothing, and if nothing is left."""
    paths = [_name(path) for path, _ in jax.tree_util.tree_leaves_with_path(params)]
    unused = [pattern for pattern in patterns if not any(fnmatchcase(path, pattern) for path in paths)]
    if unused:
        raise SettingsRefused("\n".join(_matches_nothing(pattern, paths) for pattern in unused))
    trained = [not any(fnmatchcase(path, pattern) for pattern in patterns) for path in paths]
    if patterns and not any(trained):
        raise SettingsRefused(
            f"optimizer.frozen = {list(patterns)}: freezes all {len(paths)} parameters; leave some to train"
        )
    return jax.tree.unflatten(jax.tree.structure(params), trained)


def split(params: PyTree, mask: PyTree) -> tuple[PyTree, PyTree]:
    """(trainable, frozen): each is ``params`` with None where the other has its leaf."""
    trainable = jax.tree.map(lambda leaf, trained: leaf if trained else None, params, mask)
    frozen = jax.tree.map(lambda leaf, trained: None if trained else leaf, params, mask)
    return trainable, frozen


def merge(trainable: PyTree, frozen: PyTree) -> PyTree:
    """Undoes ``split``."""
    return jax.tree.map(
        lambda leaf, other: other if leaf is None else leaf, trainable, frozen, is_leaf=lambda node: node is None
    )


def _sgd(settings: Optimizer, rate: optax.Schedule, mask: PyTree) -> optax.GradientTransformation:
    return _with_decay(optax.sgd(rate, settings.momentum or None, settings.nesterov), settings, rate, mask)


def _adamw(settings: Optimizer, rate: optax.Schedule, mask: PyTree) -> optax.GradientTransformation:
    decay = settings.weight_decay
    return optax.adamw(rate, settings.beta1, settings.beta2, settings.eps, weight_decay=decay, mask=mask)


def _lamb(settings: Optimizer, rate: optax.Schedule, mask: PyTree) -> optax.GradientTransformation:
    decay = settings.weight_decay
    return optax.lamb(rate, settings.beta1, settings.beta2, settings.eps, weight_decay=decay, mask=mask)


def _lion(settings: Optimizer, rate: optax.Schedule, mask: PyTree) -> optax.GradientTransformation:
    return optax.lion(rate, settings.beta1, settings.beta2, weight_decay=settings.weight_decay, mask=mask)


def _onebit_adam(settings: Optimizer, rate: optax.Schedule, mask: PyTree) -> optax.GradientTransformation:
    """All but the direction, which comes out of the exchange: see ``sync.onebit_adam``."""
    return _with_decay(optax.scale_by_learning_rate(rate), settings, rate, mask)


_NAMED: dict[str, Callable[[Optimizer, optax.Schedule, PyTree], optax.GradientTransformation]] = {
    "sgd": _sgd,
    "adamw": _adamw,
    "lamb": _lamb,
    "lion": _lion,
    "onebit_adam": _onebit_adam,
}
"""The optimizers of ``config.OptimizerName``."""


def _imported(settings: Optimizer, rate: optax.Schedule, mask: PyTree) -> optax.GradientTransformation:
    """The user's own optimizer, called with the schedule and ``optimizer.args``."""
    function = import_path.load(settings.name, "optimizer.name")
    if not callable(function):
        raise SettingsRefused(f"optimizer.name = {settings.name!r}: names a {type(function).__name__}, not a function")
    optimizer = import_path.call(function, "optimizer.args", settings.args, learning_rate=rate)
    if not isinstance(optimizer, optax.GradientTransformation):
        given = f"optimizer.name = {settings.name!r}: returned a {type(optimizer).__name__}"
        raise SettingsRefused(f"{given}; needed is an optax.GradientTransformation")
    return _with_decay(optimizer, settings, rate, mask)


def _with_decay(
    optimizer: optax.GradientTransformation, settings: Optimizer, rate: optax.Schedule, mask: PyTree
) -> optax.GradientTransformation:
    decay = settings.weight_decay
    return optax.chain(optimizer, decoupled_decay(decay, rate, mask)) if decay else optimizer


def _given(params: Tree | None) -> Tree:
    if params is None:
        raise ValueError("update(updates, state, params) needs the parameters here")
    return params


def _wide(leaf: Any) -> Any:
    return leaf.dtype if jnp.finfo(leaf.dtype).bits >= 32 else jnp.float32


def _name(path: tuple[Any, ...]) -> str:
    return jax.tree_util.keystr(path, simple=True, separator="/")


def _matches_nothing(pattern: str, paths: Sequence[str]) -> str:
    close = difflib.get_close_matches(pattern, paths, n=3, cutoff=0.3) or paths[:3]
    return f"optimizer.frozen: {pattern!r} matches no parameter; among the nearest are {', '.join(close)}"
