"""What detection_times.py compares with: a loop of bare JAX over several processes, in which rank 1 may fail.

    python scripts/bench/bare_jax_loop.py COORDINATOR NUM_PROCESSES RANK FAULT STEP

Each step is an all-reduce that is waited for. FAULT, one of ``debug.faults`` or ``none``, strikes as STEP begins.
"""

import sys

import jax
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from trainer.config import Fault
from trainer.resilience import faults

AXIS = "replica"


def main(coordinator: str, num_processes: int, rank: int, fault: str, at_step: int) -> None:
    jax.config.update("jax_platforms", "cpu")
    jax.distributed.initialize(coordinator, num_processes, rank)
    mesh = jax.make_mesh((num_processes,), (AXIS,), (AxisType.Auto,), devices=jax.devices())
    rows = NamedSharding(mesh, PartitionSpec(AXIS))
    ones = jax.make_array_from_process_local_data(rows, np.ones(jax.local_device_count(), np.float32))
    total = jax.jit(
        jax.shard_map(
            lambda x: jax.lax.psum(x, AXIS), mesh=mesh, in_specs=PartitionSpec(AXIS), out_specs=PartitionSpec()
        )
    )
    step = 0
    while True:
        step += 1
        if rank == 1 and step == at_step and fault != "none":
            faults.strike(Fault.model_validate({"kind": fault, "rank": rank}))
        total(ones).block_until_ready()
        print(f"step {step} done", flush=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4], int(sys.argv[5]))
