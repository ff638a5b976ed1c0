"""What the image models share: input checks, augmentation, loss and metrics around any module that gives logits.

Batches hold ``image`` (rows, image_size, image_size, channels) float32, ``label`` (rows,) int32 and ``weight`` (rows,).
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from models import checks
from models.augment import random_shift
from models.losses import correct_sum, cross_entropy_sum
from models.nnx_task import (
    Batch,
    LossParts,
    Mode,
    PureModule,
    PyTree,
    Sums,
    clear_padding,
    recorded_statistics,
    require_names,
)


@dataclass(frozen=True, kw_only=True)
class ImageClassifier(ABC):
    """A task around ``build``, the one thing that a model has to add."""

    image_size: int
    """Height and width, in pixels."""
    num_classes: int
    channels: int = 3
    dropout: float = 0.0
    """Probability with which a unit is dropped in training."""
    compute_dtype: str = "float32"
    """float32 or bfloat16: of activations. Parameters, logits and losses are float32 in either."""
    label_smoothing: float = 0.0
    """Fraction of the target spread evenly over all classes; in the training loss only."""
    random_shift: int = 0
    """Training images are shifted by up to so many pixels in each direction."""

    def __post_init__(self) -> None:
        for name in ("image_size", "num_classes", "channels"):
            checks.positive_int(name, getattr(self, name))
        checks.fraction("dropout", self.dropout)
        checks.one_of("compute_dtype", self.compute_dtype, checks.COMPUTE_DTYPES)
        checks.fraction("label_smoothing", self.label_smoothing)
        checks.non_negative_int("random_shift", self.random_shift)

    @abstractmethod
    def build(self, rngs: nnx.Rngs) -> Callable[[jax.Array, Mode], jax.Array]:
        """Returns the NNX module: (images in ``dtype``, mode) -> logits (rows, num_classes)."""

    @property
    def dtype(self) -> Any:
        """Of activations."""
        return checks.COMPUTE_DTYPES[self.compute_dtype]

    def init(self, key: jax.Array) -> tuple[PyTree, PyTree]:
        """Returns fresh ``(params, model_state)``, which depend on ``key`` alone."""
        return self._module.init(key)

    def weight(self, batch: Batch) -> jax.Array:
        """The number of real images."""
        return jnp.sum(batch["weight"])

    def loss(
        self, params: PyTree, model_state: PyTree, batch: Batch, *, key: jax.Array, axes: tuple[str, ...]
    ) -> tuple[jax.Array, LossParts]:
        """The summed cross-entropy, and accuracy, of one training pass."""
        image, label, weight = self._unpack(batch)
        shift_key, dropout_key = jax.random.split(key)
        module = self._module.bind(params, model_state)
        image = random_shift(image, self.random_shift, shift_key)
        logits = module(image.astype(self.dtype), Mode(dropout_key, weight, axes))
        loss, _ = cross_entropy_sum(logits, label, weight, label_smoothing=self.label_smoothing)
        return loss, LossParts({"accuracy": correct_sum(logits, label, weight)}, recorded_statistics(module))

    def next_model_state(self, model_state: PyTree, statistics: PyTree) -> PyTree:
        """A model without state keeps its ``{}``."""
        return model_state

    def evaluate(self, params: PyTree, model_state: PyTree, batch: Batch) -> Sums:
        """Loss (without label smoothing) and accuracy in inference mode."""
        image, label, weight = self._unpack(batch)
        logits = self._module.bind(params, model_state)(image.astype(self.dtype), Mode())
        return {"loss": cross_entropy_sum(logits, label, weight), "accuracy": correct_sum(logits, label, weight)}

    @cached_property
    def _module(self) -> PureModule[Any]:
        return PureModule(self.build)

    def _unpack(self, batch: Batch) -> tuple[jax.Array, jax.Array, jax.Array]:
        require_names(batch, "image", "label", "weight")
        given, wanted = batch["image"].shape[1:], (self.image_size, self.image_size, self.channels)
        if given != wanted:
            raise ValueError(
                f"images of shape {given}, but task.args.image_size = {self.image_size} and channels = {self.channels}"
                f" ask for {wanted}: change those, or [data]"
            )
        return clear_padding(batch["image"], batch["weight"]), batch["label"], batch["weight"]
