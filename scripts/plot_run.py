"""Draws a run's loss and accuracy over its steps: python scripts/plot_run.py RUN_DIR OUTPUT.png"""

import sys
from pathlib import Path

import matplotlib

matplotlib.use("agg")
import matplotlib.pyplot as plt

from trainer import metrics

TRAINING, TEST = "#4878a8", "#c44e52"


def draw(run_dir: Path, output: Path) -> None:
    """Writes a picture of the training rows as lines and the evaluations as dots."""
    rows = metrics.read(run_dir / "metrics.jsonl")
    names = [name for name in ("loss", "accuracy") if any(name in row for row in rows)]
    figure, axes = plt.subplots(1, len(names), figsize=(4.2 * len(names), 2.8), squeeze=False, layout="constrained")
    for axis, name in zip(axes[0], names, strict=True):
        for kind, colour, style, label in (("train", TRAINING, "-", "training"), ("eval", TEST, "o-", "test")):
            points = [(row["step"], row[name]) for row in rows if row["kind"] == kind and row.get(name) is not None]
            axis.plot(*zip(*points, strict=True), style, color=colour, label=label, linewidth=1.2, markersize=4)
        axis.set(xlabel="step", ylabel=name)
        axis.spines[["top", "right"]].set_visible(False)
        axis.legend(frameon=False)
    figure.savefig(output, dpi=110)


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    draw(Path(sys.argv[1]), Path(sys.argv[2]))
