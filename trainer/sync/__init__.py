"""The exchange: how replicas agree on a gradient.

``all_reduce`` is an ordinary optax transformation, for our train step and for anybody else's loop. Read
transform.py first, which ties the pieces together; then collectives.py with ring.py and tree.py, the algorithms,
written against levels.py; buckets.py, what travels together; state.py, what is carried from step to step; and
accounting.py with rounds.py, cost.py and choice.py: what an exchange sends, how long that takes, and which algorithm
"auto" means. With a codec, coded.py is the exchange: codecs/ has what is written on the wire, wire.py how that gets
across, lanes.py and shards.py who exchanges which part, and error_feedback.py what is kept of the rest; onebit_adam.py
is an optimizer that exchanges its momentum.
"""

from trainer.sync.accounting import Traffic, payload_bytes, traffic
from trainer.sync.choice import Choice, Links, choose
from trainer.sync.codecs import CODECS
from trainer.sync.collectives import ACROSS, ALGORITHMS
from trainer.sync.compression import Compression
from trainer.sync.cost import CostModel, Profile, Sample, fit, predict, read_profile, write_profile
from trainer.sync.onebit_adam import OneBitAdamState, onebit_adam
from trainer.sync.state import SyncState, from_pmap, num_owners, residual_norm, resize, state_specs, to_pmap
from trainer.sync.transform import all_reduce

__all__ = [
    "ACROSS",
    "ALGORITHMS",
    "CODECS",
    "Choice",
    "Compression",
    "CostModel",
    "Links",
    "OneBitAdamState",
    "Profile",
    "Sample",
    "SyncState",
    "Traffic",
    "all_reduce",
    "choose",
    "fit",
    "from_pmap",
    "num_owners",
    "onebit_adam",
    "payload_bytes",
    "predict",
    "read_profile",
    "residual_norm",
    "resize",
    "state_specs",
    "to_pmap",
    "traffic",
    "write_profile",
]
