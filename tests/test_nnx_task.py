"""From modules to nested dicts and back."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from models.nnx_task import PureModule, clear_padding, recorded_statistics


class Chain(nnx.Module):
    """Eleven layers, so that their order as names ("10" before "2") is not their order as numbers."""

    def __init__(self, rngs: nnx.Rngs):
        self.layers = nnx.List(nnx.Linear(1, 1, rngs=rngs) for _ in range(11))

    def __call__(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


def test_lists_become_dicts_with_string_keys_and_come_back_in_order():
    module = PureModule(Chain)
    params, model_state = jax.eval_shape(module.init, jax.random.key(0))
    assert model_state == {}
    assert set(params["layers"]) == {str(i) for i in range(11)}
    params = {"layers": {str(i): {"kernel": np.full((1, 1), 2.0), "bias": np.full(1, float(i))} for i in range(11)}}
    expected = np.ones((1, 1))
    for i in range(11):
        expected = 2 * expected + i
    chain = module.bind(params, {})
    np.testing.assert_array_equal(chain(jnp.ones((1, 1))), expected)
    assert recorded_statistics(chain) == ()


def test_a_module_that_keeps_random_state_is_refused():
    """It would hide randomness from the caller's key."""
    with pytest.raises(ValueError, match="Non-exhaustive"):
        PureModule(lambda rngs: nnx.Dropout(0.5, rngs=nnx.Rngs(0))).init(jax.random.key(0))


def test_clear_padding_selects():
    rows = np.array([[1.0, np.nan], [np.inf, np.nan], [3.0, 4.0]], np.float32)
    cleared = clear_padding(rows, np.array([1.0, 0.0, 1.0]))
    np.testing.assert_array_equal(cleared, [[1, np.nan], [0, 0], [3, 4]])
