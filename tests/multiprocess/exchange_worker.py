"""One of several processes that run the exchange's table: exchange_worker.py RANK NUM_PROCESSES PORT.

Prints a JSON object: for every mesh and way the hash of a replica's result. If a result is not NumPy's, or
replicas within the process differ, it ends with an error.
"""

import hashlib
import json
import sys
from pathlib import Path

import jax
import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))
from exchanges import AXES, DTYPES, assert_equals_numpy, mesh_of, program, random_tree

from trainer import sync
from trainer.sync import levels

WAYS = ["central", "ring", "tree", "xla", "hierarchical-ring", "hierarchical-tree", "hierarchical-xla", "auto"]
SHAPES = [(), (13,), (0,), (129, 33)]
MESHES = {2: [(2, 2), (4, 1)], 4: [(4, 1), (2, 2)]}


def local_rows(array):
    return np.concatenate([np.asarray(shard.data) for shard in sorted(array.addressable_shards, key=lambda s: s.index)])


def placed(mesh, tree):
    sharding = jax.NamedSharding(mesh, jax.P(AXES))

    def place(leaf):
        return jax.make_array_from_callback(leaf.shape, sharding, lambda index: leaf[index])

    return jax.tree.map(place, tree)


def results(num_processes, reduce="sum"):
    """(mesh and way, hash) for each; every replica of this process has been compared with NumPy and the others."""
    tree = random_tree(4, SHAPES, DTYPES[:2])
    full = {name: leaf for name, leaf in tree.items() if leaf.size}
    for nodes, local in MESHES[num_processes]:
        mesh = mesh_of(nodes, local)
        for way in WAYS:
            algorithm, _, across = way.partition("-")
            transform = sync.all_reduce(
                mesh, algorithm=algorithm, across=across or "auto", reduce=reduce, bucket_mib=0.01
            )
            result = program(mesh, transform)(placed(mesh, full))
            rows = {name: local_rows(leaf) for name, leaf in result.items()}
            assert_equals_numpy(rows, full, reduce)
            one_replica = b"".join(leaf[0].tobytes() for leaf in rows.values())
            yield f"{nodes}x{local} {way}", hashlib.sha256(one_replica).hexdigest()


if __name__ == "__main__":
    rank, num_processes, coordinator = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    levels.TURNS_BYTES = 4096  # the largest leaf's messages are large then
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 4 // num_processes)
    jax.distributed.initialize(coordinator, num_processes=num_processes, process_id=rank)
    print(json.dumps(dict(results(num_processes))), flush=True)
    jax.distributed.shutdown()
