"""Losses and metrics as (sum, weight): add both over any split of the data, then divide once.

An entry of weight 0 is padding. It is left out by selection, not by multiplication, so that whatever its logits hold,
NaN and infinity too, it changes neither the sums nor the gradient. An entry of positive weight is never cleaned: its
NaN reaches the sum, where the trainer sees it.
"""

import jax
import jax.numpy as jnp


def cross_entropy_sum(
    logits: jax.Array, labels: jax.Array, weight: jax.Array, *, label_smoothing: float = 0.0
) -> tuple[jax.Array, jax.Array]:
    """Returns the weighted sum of ``-log softmax(logits)[label]`` and the sum of the weights, two float32 scalars.

    logits: (..., classes), any float dtype; computed in float32.
    labels: (...), integers in [0, classes); any other label makes its loss NaN, unless its weight is 0.
    weight: (...), float32, 0 for padding.
    label_smoothing: this fraction of the target is spread evenly over all classes (Szegedy et al., 2016).

    >>> logits = jnp.zeros((2, 4))
    >>> loss, weight = cross_entropy_sum(logits, jnp.array([1, 3]), jnp.array([1.0, 0.0]))
    >>> round(float(loss / weight), 4)      # log 4; the second entry is padding
    1.3863
    """
    counts = weight > 0
    logits = jnp.where(counts[..., None], logits.astype(jnp.float32), 0)
    num_classes = logits.shape[-1]
    # A comparison instead of a gather: its gradient is elementwise, where a gather's is a scatter.
    is_label = labels[..., None] == jnp.arange(num_classes)
    target = (1 - label_smoothing) * jnp.sum(jnp.where(is_label, logits, 0), axis=-1)
    if label_smoothing:
        target += label_smoothing * jnp.mean(logits, axis=-1)
    loss = jax.nn.logsumexp(logits, axis=-1) - target
    known = (labels >= 0) & (labels < num_classes)
    loss = jnp.where(known, loss, jnp.nan)
    return jnp.sum(jnp.where(counts, loss * weight, 0)), jnp.sum(weight)


def correct_sum(logits: jax.Array, labels: jax.Array, weight: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns the weighted count of entries whose largest logit is the label's, and the sum of the weights.

    Shapes as in ``cross_entropy_sum``. Among equal logits the first class wins.
    """
    is_correct = jnp.argmax(logits, axis=-1) == labels
    return jnp.sum(jnp.where(is_correct, weight, 0)), jnp.sum(weight)
