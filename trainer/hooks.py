"""Hooks: what happens between two steps. ``Every(n, function)``, and the standard ones, each made of what it needs."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from trainer import config_file, digest
from trainer import state as states
from trainer.assembly import Assembly
from trainer.checkpoint import catalog
from trainer.checkpoint.reading import named
from trainer.checkpoint.store import Checkpoints
from trainer.config import Config
from trainer.display import Display
from trainer.errors import Halted, Preempted
from trainer.evaluation import Evaluator
from trainer.metrics import MetricsWriter, Row
from trainer.recorder import Recorder
from trainer.resilience import progress
from trainer.state import TrainState
from trainer.story import topology
from trainer.sync import num_owners, residual_norm


class Moment(NamedTuple):
    """A point between two steps: the state after ``step`` batches; ``last`` if no step follows."""

    step: int
    state: TrainState
    last: bool


Hook = Callable[[Moment], None]


class Every(NamedTuple):
    """A hook that calls ``function`` every ``num_steps`` steps (0: never) and, where ``at_end``, after the last."""

    num_steps: int
    function: Hook
    at_end: bool = True

    def is_due(self, step: int, last: bool) -> bool:
        return (self.num_steps > 0 and step % self.num_steps == 0) or (last and self.at_end)

    def __call__(self, moment: Moment) -> None:
        if self.is_due(moment.step, moment.last):
            self.function(moment)


def digesting(recorder: Recorder) -> Hook:
    """A hook that adds the parameters' hash to the step's row, after comparing it between all replicas."""

    def hook(moment: Moment) -> None:
        with recorder.pace.paused():
            recorder.annotate(param_digest=digest.agreed_digest(moment.state.params, moment.step))

    return hook


def measuring_residuals(pieces: Assembly, recorder: Recorder) -> Hook:
    """A hook that adds to the step's row how much the exchange has kept back, where it keeps anything."""
    if num_owners(pieces.shapes.sync) is None:
        return lambda moment: None
    norm = jax.jit(residual_norm)
    return lambda moment: recorder.annotate(residual_norm=norm(moment.state.sync))


def saving(pieces: Assembly, checkpoints: Checkpoints, recorder: Recorder, attempt: int) -> Hook:
    """A hook that saves. The step's report is judged first, so that nothing untrustworthy is saved."""
    meta = {
        "attempt": attempt,
        "virtual_replicas": pieces.work.num_virtual_replicas,
        "topology": topology(pieces),
        "settings": config_file.dump(pieces.config, redact=True),
    }

    def hook(moment: Moment) -> None:
        recorder.flush()
        with recorder.pace.paused(), progress.current().phase("checkpoint"):
            refuse_non_finite(states.trainable_part(pieces.parts, moment.state.params), moment.step)
            checkpoints.save(moment.state, pieces.loader.state(moment.step), meta)

    return hook


def refuse_non_finite(params: Any, step: int) -> None:
    """Ends the run if a parameter is not finite, as an update may leave it whose gradient was.

    Raises:
        Halted: names the first such parameter.
    """
    for name, finite in jax.device_get(_finite(named(params))).items():
        if not finite:
            raise Halted(
                f"parameter {name!r} is not finite after step {step}, though the gradients were: nothing was saved of "
                "it; lower optimizer.learning_rate"
            )


@jax.jit
def _finite(leaves: dict[str, jax.Array]) -> dict[str, jax.Array]:
    return {name: jnp.all(jnp.isfinite(leaf)) for name, leaf in leaves.items()}


def evaluating(
    evaluator: Evaluator,
    recorder: Recorder,
    writer: MetricsWriter | None,
    display: Display,
    attempt: int,
    rows: list[Row],
) -> Hook:
    """A hook that evaluates, writes and shows the row, and appends it to ``rows``."""

    def hook(moment: Moment) -> None:
        recorder.flush()
        with recorder.pace.paused(), progress.current().phase("eval"):
            row = {"kind": "eval", "step": moment.step, "attempt": attempt, **evaluator(moment.state)}
        rows.append(row)
        if writer is not None:
            writer.write(row)
        display.evaluation(row)

    return hook


def scoring(config: Config, checkpoints: Checkpoints, rows: list[Row]) -> Hook:
    """A hook, after that which evaluates into ``rows``, by which the best checkpoints are known."""
    metric = config.checkpoint.best_metric
    return lambda moment: checkpoints.note_scores(catalog.scores_of(rows[-1:], metric))


def stopping(saves: Every) -> Hook:
    """A hook that ends the run after the step that the agent names, if it does; ``saves`` may have saved it already.

    After the last step it never does: the run is completed then.

    Raises:
        Preempted: the state is being saved.
    """

    def hook(moment: Moment) -> None:
        if not moment.last and progress.current().must_stop(moment.step):
            if not saves.is_due(moment.step, last=False):
                saves.function(moment)
            raise Preempted(f"saved step {moment.step}")

    return hook
