"""The exchange with codecs and error feedback: against the same rules in NumPy, and what must hold for any codec."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from compressed import CODECS, InNumpy, Loop, assert_same_rows, contributions, kept
from exchanges import AXES, mesh_of
from jax.sharding import PartitionSpec

from trainer import sync
from trainer.errors import SettingsRefused

SHAPES = {"matrix": (8, 6), "odd": (3, 8), "bias": (7,), "scale": ()}


@pytest.mark.parametrize("compress", ["slow", "all"])
@pytest.mark.parametrize("name", CODECS)
@pytest.mark.parametrize(("nodes", "local"), [(2, 4), (4, 2), (3, 2)])
def test_it_is_the_rule_written_in_numpy(name, compress, nodes, local):
    mesh = mesh_of(nodes, local)
    transform = sync.all_reduce(
        mesh, reduce="sum", codec=CODECS[name](), compress=compress, error_feedback=True, bucket_mib=1e-6
    )
    loop, rule = Loop(mesh, transform, SHAPES), InNumpy(name, nodes, local, compress)
    for step in range(3):
        tree = contributions(nodes * local, SHAPES, step)
        result, expected = loop(tree), rule(tree)
        assert_same_rows(result)
        for leaf in SHAPES:
            # bfloat16 may round a value that differs in its last float32 bit to the other side.
            bound = 0.04 if name == "halves" else 2e-5
            np.testing.assert_allclose(result[leaf][0], expected[leaf], rtol=0, atol=bound)
            assert np.median(np.abs(result[leaf][0] - expected[leaf])) < 2e-6
    for leaf, residual in kept(loop.state).items():
        np.testing.assert_allclose(residual / rule.owners, rule.residual[leaf], rtol=0, atol=0.04)
