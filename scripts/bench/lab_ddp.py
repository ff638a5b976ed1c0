"""The PyTorch side of lab_overlap.py: the same layers and batch under DistributedDataParallel over Gloo.

Started by lab_overlap.py on each host, in an environment that holds PyTorch only: neither JAX nor NumPy is needed.
"""

import datetime
import json
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

WAIT = datetime.timedelta(seconds=60)


def main(worker) -> None:
    """The entry, with ``--worker JOB RESULT``: joins the other hosts, and writes what ``worker(job)`` reports."""
    _, _, job_file, result_file = sys.argv
    job = json.loads(Path(job_file).read_text())
    torch.set_num_threads(1)
    torch.manual_seed(0)
    dist.init_process_group("gloo", f"tcp://{job['coordinator']}", WAIT, job["num_processes"], job["rank"])
    report = worker(job)
    dist.barrier()
    dist.destroy_process_group()
    Path(result_file).write_text(json.dumps(report))


def timed(call, times: int) -> dict:
    """Wall and processor seconds a call, of ``times`` calls that begin on all hosts together."""
    dist.barrier()
    begin, used = time.perf_counter(), time.process_time()
    for _ in range(times):
        call()
    return {"seconds": (time.perf_counter() - begin) / times, "cpu_seconds": (time.process_time() - used) / times}


def layers(job: dict) -> torch.nn.Module:
    result = torch.nn.Sequential()
    for _ in range(job["layers"]):
        linear = torch.nn.Linear(job["width"], job["width"], bias=False)
        torch.nn.init.normal_(linear.weight, std=(2 / job["width"]) ** 0.5)
        result.extend([linear, torch.nn.ReLU()])
    return result


def stepper(model: torch.nn.Module, x: torch.Tensor, learning_rate: float):
    optimizer = torch.optim.SGD(model.parameters(), lr=learning_rate)

    def step() -> None:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()

    return step


def worker(job: dict) -> dict:
    x = torch.randn(job["batch"], job["width"])
    alone, model = layers(job), layers(job)
    shared = torch.nn.parallel.DistributedDataParallel(model)
    gradients = [torch.zeros_like(parameter) for parameter in model.parameters()]
    calls = {
        "compute": stepper(alone, x, job["learning_rate"]),
        "exchange": lambda: [work.wait() for work in [dist.all_reduce(leaf, async_op=True) for leaf in gradients]],
        "step": stepper(shared, x, job["learning_rate"]),
    }
    for call in (*calls.values(), *calls.values()):
        call()  # DDP rebuilds its buckets after the first step
    report = {name: [] for name in calls}
    for _ in range(job["repetitions"]):
        for name, call in calls.items():
            report[name].append(timed(call, job["steps"]))
    return report


if __name__ == "__main__":
    main(worker)
