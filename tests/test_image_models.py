"""MLP and ResNet against plain NumPy in float64; random shift; dropout; initial parameters; the image loss."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models.augment import random_shift
from models.dropout import dropout
from models.initializers import fan_normal
from models.mlp import MLPClassifier
from models.nnx_task import Mode
from models.resnet import ResNetClassifier


def conv(x, kernel, stride):
    """(S, S, C) -> one output pixel at a time."""
    size = kernel.shape[0]
    padded = np.pad(x, ((size // 2, size // 2), (size // 2, size // 2), (0, 0)))
    steps = range(0, x.shape[0], stride)
    return np.array([[np.tensordot(padded[i : i + size, j : j + size], kernel, 3) for j in steps] for i in steps])


def norm(x, params, state):
    return (x - state["mean"]) / np.sqrt(state["var"] + 1e-5) * params["scale"] + params["bias"]


def resnet(image, params, state, imagenet, strides, bottleneck):
    x = conv(image, params["stem"]["kernel"], 2 if imagenet else 1)
    x = np.maximum(norm(x, params["stem_norm"], state["stem_norm"]), 0)
    if imagenet:
        padded = np.pad(x, ((1, 1), (1, 1), (0, 0)), constant_values=-np.inf)
        steps = range(0, x.shape[0], 2)
        x = np.array([[padded[i : i + 3, j : j + 3].max((0, 1)) for j in steps] for i in steps])
    for index, stride in enumerate(strides):
        block, block_state, y = params["blocks"][str(index)], state["blocks"][str(index)], x
        for position in range(len(block["convs"])):
            own_stride = stride if position == int(bottleneck) else 1
            y = conv(y, block["convs"][str(position)]["kernel"], own_stride)
            y = norm(y, block["norms"][str(position)], block_state["norms"][str(position)])
            y = np.maximum(y, 0) if position < len(block["convs"]) - 1 else y
        if "shortcut" in block:
            x = conv(x, block["shortcut"]["kernel"], stride)
            x = norm(x, block["shortcut_norm"], block_state["shortcut_norm"])
        x = np.maximum(x + y, 0)
    return x.mean((0, 1)) @ params["head"]["kernel"] + params["head"]["bias"]


@pytest.mark.parametrize(
    ("depth", "stem", "blocks", "size"), [(18, "cifar", (2, 2, 2, 2), 8), (50, "imagenet", (3, 4, 6, 3), 16)]
)
def test_resnet_equals_numpy(depth, stem, blocks, size):
    task = ResNetClassifier(image_size=size, channels=2, num_classes=3, depth=depth, stem=stem, width=2)
    rng = np.random.default_rng(0)
    shapes = jax.eval_shape(task.init, jax.random.key(0))
    params, state = jax.tree.map(lambda leaf: (0.5 * rng.random(leaf.shape) + 0.1).astype(np.float32), shapes)
    params = jax.tree.map(lambda leaf: leaf * np.where(rng.random(leaf.shape) < 0.4, -1, 1).astype(np.float32), params)
    images = rng.normal(size=(2, size, size, 2)).astype(np.float32)
    logits = jax.jit(lambda params, state: task._module.bind(params, state)(jnp.asarray(images), Mode()))(params, state)
    exact = jax.tree.map(np.float64, (params, state))
    strides = [2 if stage > 0 and i == 0 else 1 for stage, num in enumerate(blocks) for i in range(num)]
    for image, ours in zip(images, logits, strict=True):
        expected = resnet(image, *exact, stem == "imagenet", strides, depth == 50)
        # Float32 against float64, relative to the largest entry: measured 3e-7.
        np.testing.assert_allclose(ours, expected, rtol=0, atol=2e-6 * np.abs(expected).max())


def test_mlp_loss_equals_numpy():
    task = MLPClassifier(image_size=3, channels=2, num_classes=4, hidden=[5, 6])
    params, _ = task.init(jax.random.key(0))
    rng = np.random.default_rng(0)
    image = rng.normal(size=(5, 3, 3, 2)).astype(np.float32)
    label, weight = rng.integers(0, 4, 5).astype(np.int32), np.array([1, 1, 0, 1, 1], np.float32)
    exact = jax.tree.map(np.float64, params)
    x = np.float64(image).reshape(5, -1)
    for index in ("0", "1"):
        x = np.maximum(x @ exact["layers"][index]["kernel"] + exact["layers"][index]["bias"], 0)
    logits = x @ exact["head"]["kernel"] + exact["head"]["bias"]
    log_share = logits - np.log(np.exp(logits).sum(1, keepdims=True))
    batch = {"image": image, "label": label, "weight": weight}
    loss, parts = task.loss(params, {}, batch, key=jax.random.key(0), axes=())
    np.testing.assert_allclose(loss, -(log_share[np.arange(5), label] * weight).sum(), rtol=1e-5)
    assert parts.metrics["accuracy"] == (((logits.argmax(1) == label) * weight).sum(), 4)


def test_label_smoothing_is_for_training_only():
    plain, smooth = (MLPClassifier(image_size=2, num_classes=3, label_smoothing=s) for s in (0.0, 0.2))
    params, _ = plain.init(jax.random.key(0))
    image = np.random.default_rng(0).normal(size=(4, 2, 2, 3)).astype(np.float32)
    batch = {"image": image, "label": np.arange(4, dtype=np.int32) % 3, "weight": np.ones(4, np.float32)}
    losses = [task.loss(params, {}, batch, key=jax.random.key(0), axes=())[0] for task in (plain, smooth)]
    assert losses[0] != losses[1]
    assert plain.evaluate(params, {}, batch)["loss"] == smooth.evaluate(params, {}, batch)["loss"]


@pytest.mark.parametrize("pixels", [0, 1, 2])
def test_random_shift_moves_each_image_by_its_own_offset(pixels):
    rng = np.random.default_rng(0)
    images = rng.normal(size=(200, 4, 5, 2)).astype(np.float32)
    shifted = np.asarray(random_shift(jnp.asarray(images), pixels, jax.random.key(0)))
    padded = np.pad(images, ((0, 0), (pixels, pixels), (pixels, pixels), (0, 0)))
    offsets = [(i, j) for i in range(2 * pixels + 1) for j in range(2 * pixels + 1)]
    seen = set()
    for before, after in zip(padded, shifted, strict=True):
        found = [(i, j) for i, j in offsets if (before[i : i + 4, j : j + 5] == after).all()]
        assert len(found) == 1
        seen.update(found)
    assert seen == set(offsets)


def test_dropout_keeps_the_mean_and_scales_what_it_keeps():
    x = jnp.full((400, 50), 2.0)
    y = np.asarray(dropout(x, 0.25, jax.random.key(0)))
    np.testing.assert_allclose(np.unique(y), [0, 2 / 0.75], rtol=1e-6)
    assert abs((y == 0).mean() - 0.25) < 0.01  # three standard deviations
    assert dropout(x, 0.25, None) is x
    assert dropout(x, 0.0, jax.random.key(0)) is x


@pytest.mark.parametrize(("fan", "expected"), [("in", 9 * 40), ("out", 9 * 60), ("mean", 9 * 50)])
def test_initial_variance_is_gain_over_fan(fan, expected):
    kernel = fan_normal(fan, 2.0)(jax.random.key(0), (3, 3, 40, 60))
    np.testing.assert_allclose(np.var(np.asarray(kernel)), 2.0 / expected, rtol=0.05)
    assert abs(np.mean(np.asarray(kernel))) < 0.01 * np.sqrt(2.0 / expected) * 5
