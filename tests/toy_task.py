"""A task in plain JAX, without flax: the smallest thing that the trainer takes."""

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
