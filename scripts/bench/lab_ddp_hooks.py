"""The PyTorch side of lab_codecs.py: gradients of given shapes under DistributedDataParallel with its hooks, over Gloo.

Started by lab_codecs.py on each host, in an environment that holds PyTorch and NumPy only.
"""

import time

import torch
import torch.distributed as dist
from lab_ddp import main
from lab_hosts import bytes_sent
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

RANK = 4
ONE_BUCKET = 10_000


class Linear(torch.nn.Module):
    """Parameters of given shapes; its output is linear in them, so that their gradients are what it is called with."""

    def __init__(self, shapes: list[list[int]]):
        super().__init__()
        self.leaves = torch.nn.ParameterList(torch.zeros(shape) for shape in shapes)

    def forward(self, gradients: list[torch.Tensor]) -> torch.Tensor:
        return sum((leaf * gradient).sum() for leaf, gradient in zip(self.leaves, gradients, strict=True))


def subject(label: str, shapes: list[list[int]], gradients: list[torch.Tensor]):
    """A call that exchanges the gradients once."""
    # Gloo gets the PowerSGD hook's messages of several buckets in another order on each host, and fails: one for all.
    bucket_mb = ONE_BUCKET if "powersgd" in label else None
    model = torch.nn.parallel.DistributedDataParallel(Linear(shapes), bucket_cap_mb=bucket_mb)
    if "fp16" in label:
        model.register_comm_hook(None, default_hooks.fp16_compress_hook)
    elif "powersgd" in label:
        # Exact for the first two, the fewest that it allows; we warm up for longer.
        state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=RANK, start_powerSGD_iter=2)
        model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)

    def call() -> None:
        model.zero_grad()
        model(gradients).backward()

    return call


def timed(call) -> tuple[float, int]:
    """Seconds and bytes sent of a call that begins on all hosts together."""
    dist.barrier()
    sent, begin = bytes_sent(), time.perf_counter()
    call()
    seconds = time.perf_counter() - begin
    dist.barrier()
    return seconds, bytes_sent() - sent


def worker(job: dict) -> dict:
    gradients = [torch.randn(shape) for shape in job["shapes"]]
    calls = {label: subject(label, job["shapes"], gradients) for label in job["labels"]}
    report = {label: {"seconds": [], "bytes_sent": []} for label in calls}
    for repetition in range(job["warm_up"] + job["repetitions"]):
        for label, call in calls.items():
            seconds, num_bytes = timed(call)
            if repetition >= job["warm_up"]:
                report[label]["seconds"].append(seconds)
                report[label]["bytes_sent"].append(num_bytes)
    return report


if __name__ == "__main__":
    main(worker)
