"""Evaluation on the test split: every example once, whatever the number of devices."""

import jax
import numpy as np

from trainer import mesh as meshes
from trainer.assembly import Assembly, task_batch_shapes
from trainer.data import Batches, evaluation_batches, open_source
from trainer.data.batches import read_batch, read_filler
from trainer.metrics import Row, mean, merge
from trainer.resilience import progress
from trainer.state import TrainState
from trainer.step import evaluation_program, params_to_evaluate
from trainer.task_check import Subject, check_evaluation


class Evaluator:
    """Evaluates states of one run; compiles at its first use."""

    def __init__(self, pieces: Assembly) -> None:
        """Opens the test split, so that a run whose test data is missing ends before it has trained.

        ``metric_names`` is what an evaluation will tell of.
        """
        self._pieces = pieces
        self._source = open_source(pieces.config.data, "test")
        self._batches().close()
        config = pieces.config
        row = read_batch(self._source, read_filler(self._source), np.zeros(1, np.int64))
        self.metric_names = check_evaluation(
            Subject(pieces.parts.task, config.task.target, config.data.source),
            task_batch_shapes(row, config.data.global_batch),
            config.data.global_batch // pieces.work.num_virtual_replicas,
        )
        self._program = evaluation_program(pieces.parts, pieces.work)

    def __call__(self, state: TrainState) -> Row:
        """The metrics of the test split, ``loss`` among them, and the exact number of its ``examples``."""
        params, mesh, sums, pending = params_to_evaluate(state), self._pieces.mesh, [], None
        with self._batches() as batches:
            for batch in batches:
                # Read one batch late: the device is never idle, and never has more than two programs to exchange in,
                # for emulated devices that wait for each other in many of them take all threads and stop for good.
                progress.current().tick()
                before, pending = pending, self._program(params, state.model_state, meshes.place_rows(mesh, batch))
                sums += [] if before is None else [jax.device_get(before)]
        total = merge([*sums, jax.device_get(pending)])
        examples, _ = total.pop("examples")
        return {**{name: mean(*pair) for name, pair in total.items()}, "examples": int(examples)}

    def _batches(self) -> Batches:
        data, mesh = self._pieces.config.data, self._pieces.mesh
        return evaluation_batches(
            self._source,
            data.global_batch,
            meshes.local_rows(mesh, data.global_batch),
            num_threads=data.num_threads,
            prefetch_batches=data.prefetch_batches,
        )
