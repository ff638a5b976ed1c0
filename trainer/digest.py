"""A hash of every parameter's bytes, taken on each replica by itself, so that two replicas that differ are found."""

import hashlib
from typing import Any

import jax
import numpy as np

from trainer import runtime
from trainer.errors import Halted


def replica_digests(params: Any) -> dict[int, str]:
    """Device id -> hash of all parameters as this process's device holds them (paths, shapes, dtypes and bytes)."""
    hashes: dict[int, Any] = {}
    for path, leaf in jax.tree_util.tree_flatten_with_path(params)[0]:
        for shard in leaf.addressable_shards:
            hasher = hashes.setdefault(shard.device.id, hashlib.sha256())
            hasher.update(f"{jax.tree_util.keystr(path)} {leaf.shape} {leaf.dtype}".encode())
            hasher.update(np.ascontiguousarray(shard.data).tobytes())
    return {device: hasher.hexdigest()[:16] for device, hasher in hashes.items()}


def agreed_digest(params: Any, step: int) -> str:
    """The digest that all replicas of all processes share. All processes call it together.

    Raises:
        Halted: the replicas differ; names the devices by digest.
    """
    everyone: dict[str, list[int]] = {}
    for digests in runtime.agree(f"digest of step {step}", list(replica_digests(params).items())):
        for device, digest in digests:
            everyone.setdefault(digest, []).append(device)
    if len(everyone) > 1:
        groups = "; ".join(f"devices {devices} have {digest}" for digest, devices in everyone.items())
        raise Halted(f"the replicas' parameters differ after step {step}: {groups}")
    return next(iter(everyone))
