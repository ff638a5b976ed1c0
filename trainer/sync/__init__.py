"""The exchange: how replicas agree on a gradient.

``all_reduce`` is an ordinary optax transformation, for our train step and for anybody else's loop. Read
transform.py first, which ties the pieces together; then collectives.py with ring.py and tree.py, the algorithms,
written against levels.py; buckets.py, what travels together; state.py, what is carried from step to step; and
accounting.py, cost.py and choice.py: what an exchange sends, how long that takes, and which algorithm "auto" means.
"""

from trainer.sync.accounting import Traffic, payload_bytes, traffic
from trainer.sync.choice import Choice, Links, choose
from trainer.sync.collectives import ACROSS, ALGORITHMS
from trainer.sync.cost import CostModel, Profile, Sample, fit, predict, read_profile, write_profile
from trainer.sync.state import SyncState, resize, state_specs
from trainer.sync.transform import all_reduce

__all__ = [
    "ACROSS",
    "ALGORITHMS",
    "Choice",
    "CostModel",
    "Links",
    "Profile",
    "Sample",
    "SyncState",
    "Traffic",
    "all_reduce",
    "choose",
    "fit",
    "payload_bytes",
    "predict",
    "read_profile",
    "resize",
    "state_specs",
    "traffic",
    "write_profile",
]
