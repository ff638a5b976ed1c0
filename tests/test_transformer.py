"""GPT and ViT against a plain NumPy forward pass in float64, and what a causal model may not see."""

from functools import lru_cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models.gpt import GPT
from models.nnx_task import Mode
from models.vit import ViTClassifier


def linear(x, params):
    return x @ params["kernel"] + params.get("bias", 0)


def norm(x, params):
    centred = x - x.mean(-1, keepdims=True)
    return centred / np.sqrt((centred**2).mean(-1, keepdims=True) + 1e-6) * params["scale"] + params["bias"]


def gelu(x):
    return 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


def attention(x, params, num_heads, causal):
    """One row (T, D), one head, one query at a time."""
    query, key, value = (linear(x, params[name]) for name in ("query", "key", "value"))
    result = np.zeros_like(x)
    for head in np.split(np.arange(x.shape[1]), num_heads):
        for t in range(len(x)):
            seen = slice(0, t + 1 if causal else None)
            score = np.exp(key[seen, head] @ query[t, head] / np.sqrt(len(head)))
            result[t, head] = score / score.sum() @ value[seen, head]
    return linear(result, params["output"])


def blocks(x, params, num_heads, causal):
    for index in range(len(params["blocks"])):
        block = params["blocks"][str(index)]
        x = x + attention(norm(x, block["attention_norm"]), block["attention"], num_heads, causal)
        x = x + linear(gelu(linear(norm(x, block["mlp_norm"]), block["mlp"]["expand"])), block["mlp"]["contract"])
    return norm(x, params["norm"])


def start(task):
    """Parameters drawn by NumPy, so that biases and scales matter too, in float32 and in float64."""
    shapes, _ = jax.eval_shape(task.init, jax.random.key(0))
    rng = np.random.default_rng(5)
    params = jax.tree.map(lambda leaf: rng.normal(0.05, 0.4, leaf.shape).astype(np.float32), shapes)
    return params, jax.tree.map(np.float64, params)


@lru_cache
def compiled(task):
    return jax.jit(lambda params, inputs: task._module.bind(params, {})(inputs, Mode()))


def logits_of(task, params, inputs):
    return np.asarray(compiled(task)(params, inputs))


def log_softmax(x):
    return x - np.log(np.exp(x).sum(-1, keepdims=True))


def assert_near(ours, expected):
    """Float32 against float64, relative to the largest entry: measured 4e-7."""
    np.testing.assert_allclose(ours, expected, rtol=0, atol=2e-6 * np.abs(expected).max())


def make_gpt(tied=True):
    return GPT(vocab_size=13, context_length=7, width=12, depth=2, num_heads=3, tie_embeddings=tied)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("length", [1, 7])
def test_gpt_equals_numpy(tied, length):
    task = make_gpt(tied)
    params, exact = start(task)
    tokens = np.random.default_rng(0).integers(0, 13, (2, length)).astype(np.int32)
    logits = logits_of(task, params, tokens)
    assert (logits.dtype, logits.shape) == (np.float32, (2, length, 13))
    for row, ours in zip(tokens, logits, strict=True):
        x = blocks(exact["embed"]["embedding"][row] + exact["position"][:length], exact, 3, causal=True)
        expected = x @ exact["embed"]["embedding"].T if tied else linear(x, exact["head"])
        assert_near(ours, expected)


def test_gpt_sees_no_later_token():
    task = make_gpt()
    params, _ = start(task)
    tokens = np.random.default_rng(0).integers(0, 13, (2, 7)).astype(np.int32)
    before = logits_of(task, params, tokens)
    for t in range(7):
        changed = tokens.copy()
        changed[:, t] = (changed[:, t] + 1) % 13
        after = logits_of(task, params, changed)
        np.testing.assert_array_equal(after[:, :t], before[:, :t])
        assert (after[:, t:] != before[:, t:]).any(axis=-1).all()


@pytest.mark.parametrize("with_mask", [True, False])
def test_gpt_loss_is_the_sum_over_counted_targets(with_mask):
    task = make_gpt()
    params, _ = start(task)
    rng = np.random.default_rng(1)
    tokens = rng.integers(0, 13, (4, 8)).astype(np.int32)
    weight, mask = np.array([1, 0, 1, 1], np.float32), (rng.random((4, 7)) < 0.6).astype(np.float32)
    batch = {"tokens": tokens, "weight": weight} | ({"mask": mask} if with_mask else {})
    log_share = log_softmax(np.float64(logits_of(task, params, tokens[:, :-1])))
    counted = weight[:, None] * (mask if with_mask else np.ones((4, 7)))
    expected = -(np.take_along_axis(log_share, tokens[:, 1:, None], -1)[..., 0] * counted).sum()
    loss, parts = jax.jit(partial(task.loss, key=jax.random.key(0), axes=()))(params, {}, batch)
    np.testing.assert_allclose(loss, expected, rtol=1e-5)
    assert task.weight(batch) == counted.sum()
    assert parts.statistics == ()
    sums = jax.jit(task.evaluate)(params, {}, batch)
    np.testing.assert_allclose(sums["loss"], (expected, counted.sum()), rtol=1e-5)
    assert sums["accuracy"][0] == ((log_share.argmax(-1) == tokens[:, 1:]) * counted).sum()


@pytest.mark.parametrize("pooling", ["mean", "cls"])
def test_vit_equals_numpy(pooling):
    task = ViTClassifier(
        image_size=6, patch_size=3, channels=2, width=12, depth=2, num_heads=3, num_classes=5, pooling=pooling
    )
    params, exact = start(task)
    images = np.random.default_rng(0).normal(size=(2, 6, 6, 2)).astype(np.float32)
    for image, ours in zip(images, logits_of(task, params, images), strict=True):
        patches = [image[i : i + 3, j : j + 3].reshape(-1) for i in (0, 3) for j in (0, 3)]
        x = linear(np.stack(patches), exact["embed"])
        x = np.concatenate([exact["cls"][None], x]) if pooling == "cls" else x
        x = blocks(x + exact["position"], exact, 3, causal=False)
        expected = linear(x[0] if pooling == "cls" else x.mean(0), exact["head"])
        assert_near(ours, expected)


def test_untouched_gpt_starts_near_the_uniform_loss():
    task = GPT(vocab_size=256, context_length=16, width=64, depth=1, num_heads=4)
    params, _ = jax.jit(task.init)(jax.random.key(0))
    tokens = jax.random.randint(jax.random.key(1), (4, 17), 0, 256)
    loss, weight = jax.jit(task.evaluate)(params, {}, {"tokens": tokens, "weight": jnp.ones(4)})["loss"]
    np.testing.assert_allclose(loss / weight, np.log(256), rtol=0.005)  # measured 0.001
