"""digits: 1,797 real handwritten digits of 8 x 8 pixels, which scikit-learn ships, so they are on every machine."""

import numpy as np
from sklearn.datasets import load_digits

from trainer.data.source import ArraySource, Source, Split

_LARGEST_PIXEL = 16.0


def digits(*, split: Split) -> Source:
    """Returns 1,437 training or 360 test examples: ``image`` float32 (8, 8, 1) in 0..1, ``label`` int32 in 0..9.

    The split is fixed: in a random order sorted by label, every fifth image is for testing, so each label is shared out
    four to one.
    """
    pixels, labels = (np.asarray(part) for part in load_digits(return_X_y=True))
    order = np.random.RandomState(0).permutation(len(labels))  # Its stream is frozen for good.
    order = order[np.argsort(labels[order], kind="stable")]
    is_test = np.arange(len(order)) % 5 == 0
    chosen = np.sort(order[is_test] if split == "test" else order[~is_test])
    images = (pixels[chosen].reshape(-1, 8, 8, 1) / _LARGEST_PIXEL).astype(np.float32)
    return ArraySource({"image": images, "label": labels[chosen].astype(np.int32)})
