"""The exchange between processes over Gloo: the table once more, smaller, and the same bits in every process."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from trainer.launch.rendezvous import reserved_address

WORKER = Path(__file__).with_name("exchange_worker.py")
LIMIT_SECONDS = 240
"""A hang fails the test; four processes take about 15 s on two idle cores."""


def run_workers(num_processes):
    """What each of the processes printed."""
    with reserved_address("127.0.0.1", num_processes) as coordinator:
        return outputs_of(num_processes, coordinator)


def outputs_of(num_processes, coordinator):
    environment = {name: value for name, value in os.environ.items() if "_proxy" not in name.lower()}
    workers = [
        subprocess.Popen(
            [sys.executable, str(WORKER), str(rank), str(num_processes), coordinator],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(num_processes)
    ]
    try:
        outputs = [worker.communicate(timeout=LIMIT_SECONDS) for worker in workers]
    finally:
        for worker in workers:
            worker.kill()
            worker.wait()
    for worker, (_, errors) in zip(workers, outputs, strict=True):
        assert worker.returncode == 0, errors[-3000:]
    return [json.loads(output.splitlines()[-1]) for output, _ in outputs]


@pytest.mark.parametrize("num_processes", [2, 4])
def test_every_process_has_numpys_result_in_the_same_bits(num_processes):
    reports = run_workers(num_processes)
    assert len(reports[0]) == 16
    assert all(report == reports[0] for report in reports)
