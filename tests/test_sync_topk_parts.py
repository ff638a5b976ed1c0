"""Top-k on the parts that a node's devices hold is top-k on whole leaves."""

import numpy as np
import pytest
from compressed import Loop, assert_same_rows, contributions, kept
from exchanges import mesh_of

from trainer import sync

SHAPES = {"rows": (8, 9), "columns": (9, 8), "no dim": (7, 9), "kernel": (3, 3, 4, 6), "short": (6,), "long": (1003,)}


def whole_numbers(num_replicas, step):
    """Contributions whose sums float32 can hold whatever their order, with next to no ties."""
    return {key: np.round(leaf * 2**16) for key, leaf in contributions(num_replicas, SHAPES, step).items()}


@pytest.mark.parametrize("ratio", [0.01, 0.3])
@pytest.mark.parametrize(("local", "is_shared_out"), [(4, True), (2, False)])
def test_nodes_of_several_devices_send_what_nodes_of_one_would(local, is_shared_out, ratio):
    arguments = {"codec": "topk", "codec_args": {"ratio": ratio}, "error_feedback": True, "reduce": "sum"}
    many, one = mesh_of(2, local), mesh_of(2, 1)
    loops = [
        Loop(mesh, sync.all_reduce(mesh, **arguments), SHAPES, is_shared_out=is_shared_out) for mesh in (many, one)
    ]
    for step in range(3):
        tree = whole_numbers(2 * local, step)
        nodes = {key: leaf.reshape(2, local, *leaf.shape[1:]).sum(axis=1) for key, leaf in tree.items()}
        results = [loops[0](tree), loops[1](nodes)]
        assert_same_rows(results[0])
        for key in SHAPES:
            np.testing.assert_array_equal(results[0][key][0], results[1][key][0], err_msg=key)
        if step == 0:  # all is new, so what a node keeps is all but k
            for key, residual in kept(loops[0].state).items():
                k = max(1, round(ratio * residual[0].size))
                assert [np.count_nonzero(node) for node in residual] == [residual[0].size - k] * 2, key
    residuals = [kept(loop.state) for loop in loops]
    for key, residual in residuals[1].items():
        np.testing.assert_array_equal(residuals[0][key], residual, err_msg=key)
    kept_here = loops[0].state.by_shard["residual"]["rows"].addressable_shards[0].data
    assert kept_here.shape == ((1, 8 // local, 9) if is_shared_out else (1, 8, 9))


def test_of_ties_between_parts_the_first_part_sends():
    mesh = mesh_of(2, 4)
    loop = Loop(mesh, sync.all_reduce(mesh, codec="topk", codec_args={"ratio": 0.25}, reduce="sum"), {"w": (16, 4)})
    found = loop({"w": np.ones((8, 16, 4), np.float32)})
    assert_same_rows(found)
    np.testing.assert_array_equal(found["w"][0], 8.0 * (np.arange(64) < 16).reshape(16, 4))
