"""Tasks in plain JAX, without flax: ``Mean`` is the smallest thing that the trainer takes."""

import jax
import jax.numpy as jnp


class Mean:
    """Learns the mean image."""

    def init(self, key):
        return {"mean": jnp.zeros((8, 8, 1))}, {}

    def weight(self, batch):
        return jnp.sum(batch["weight"])

    def loss(self, params, model_state, batch, *, key, axes):
        errors = jnp.sum((batch["image"] - params["mean"]) ** 2, axis=(1, 2, 3))
        return jnp.sum(errors * batch["weight"]), ({}, ())

    def next_model_state(self, model_state, statistics):
        return model_state

    def evaluate(self, params, model_state, batch):
        return {"loss": (self.loss(params, {}, batch, key=None, axes=())[0], self.weight(batch))}


class Normed:
    """Classifies images by one hidden layer with dropout and batch-norm over all replicas."""

    def init(self, key):
        first, second = jax.random.split(key)
        params = {"hidden": 0.1 * jax.random.normal(first, (64, 16)), "out": 0.1 * jax.random.normal(second, (16, 10))}
        return params, {"mean": jnp.zeros(16)}

    def weight(self, batch):
        return jnp.sum(batch["weight"])

    def loss(self, params, model_state, batch, *, key, axes):
        x = batch["image"].reshape(-1, 64)
        hidden = jnp.where(jax.random.bernoulli(key, 0.5, x.shape), 2 * x, 0) @ params["hidden"]
        sums = (batch["weight"] @ hidden, jnp.sum(batch["weight"]))
        total, weight = jax.lax.psum(sums, axes) if axes else sums
        errors = self._errors(params, hidden, total / weight, batch["label"])
        return jnp.sum(errors * batch["weight"]), ({}, {"total": sums[0], "weight": sums[1]})

    def next_model_state(self, model_state, statistics):
        return {"mean": 0.5 * model_state["mean"] + 0.5 * statistics["total"] / statistics["weight"]}

    def evaluate(self, params, model_state, batch):
        hidden = batch["image"].reshape(-1, 64) @ params["hidden"]
        errors = self._errors(params, hidden, model_state["mean"], batch["label"])
        return {"loss": (jnp.sum(errors * batch["weight"]), self.weight(batch))}

    def _errors(self, params, hidden, mean, label):
        logits = jnp.tanh(hidden - mean) @ params["out"]
        return -jnp.take_along_axis(jax.nn.log_softmax(logits), label[:, None], axis=1)[:, 0]
