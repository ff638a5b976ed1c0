"""Which of a run's processes this one is. Apart from ``runtime``, so that the agent can say it without loading JAX."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Placement:
    """rank: this process's index; num_processes: how many there are; coordinator: HOST:PORT where rank 0 listens
    for the others, "" for a single process; local_rank, num_local: the same among the processes of its host."""

    rank: int = 0
    num_processes: int = 1
    coordinator: str = ""
    local_rank: int = 0
    num_local: int = 1
