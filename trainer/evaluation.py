"""Evaluation on the test split: every example once, whatever the number of devices."""

import jax

from trainer import mesh as meshes
from trainer.assembly import Assembly
from trainer.data import Batches, evaluation_batches, open_source
from trainer.metrics import Row, mean, merge
from trainer.state import TrainState
from trainer.step import evaluation_program, params_to_evaluate


class Evaluator:
    """Evaluates states of one run; compiles at its first use."""

    def __init__(self, pieces: Assembly) -> None:
        """Opens the test split, so that a run whose test data is missing ends before it has trained."""
        self._pieces = pieces
        self._source = open_source(pieces.config.data, "test")
        self._batches().close()
        self._program = evaluation_program(pieces.parts, pieces.work)

    def __call__(self, state: TrainState) -> Row:
        """The metrics of the test split, ``loss`` among them, and the exact number of its ``examples``."""
        params = params_to_evaluate(state)
        with self._batches() as batches:
            sums = [
                self._program(params, state.model_state, meshes.place_rows(self._pieces.mesh, batch))
                for batch in batches
            ]
        total = merge(jax.device_get(sums))
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
