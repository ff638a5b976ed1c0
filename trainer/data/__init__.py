"""Data: where examples come from (``sources``), and batches as a function of (seed, step) (``loader``).

Read ``source.py``, ``sources.py``, ``order.py``, ``batches.py``, ``loader.py``; each source has a file of its own.
"""

from trainer.data.batches import Batch, Batches
from trainer.data.loader import Loader, evaluation_batches, num_batches_per_epoch
from trainer.data.source import ArraySource, Example, Source, Split, TokenWindows
from trainer.data.sources import open_source

__all__ = [
    "ArraySource",
    "Batch",
    "Batches",
    "Example",
    "Loader",
    "Source",
    "Split",
    "TokenWindows",
    "evaluation_batches",
    "num_batches_per_epoch",
    "open_source",
]
