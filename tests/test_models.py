"""What every task class here promises, as one table; and the errors at construction."""

import os
import subprocess
import sys
from dataclasses import replace
from functools import lru_cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models.gpt import GPT
from models.mlp import MLPClassifier
from models.resnet import ResNetClassifier
from models.vit import ViTClassifier
from trainer.task import Task

IMAGE = {"image_size": 8, "channels": 1, "num_classes": 3}
VIT = {**IMAGE, "patch_size": 4, "width": 8, "depth": 1, "num_heads": 2}
TEXT = {"vocab_size": 11, "context_length": 6, "width": 8, "depth": 1, "num_heads": 2}
TASKS = {
    "mlp": MLPClassifier(**IMAGE, hidden=(8, 8), dropout=0.5),
    "vit": ViTClassifier(**VIT, dropout=0.5, random_shift=1, label_smoothing=0.1),
    "resnet": ResNetClassifier(**IMAGE, width=2, dropout=0.5),
    "gpt": GPT(**TEXT, dropout=0.5),
}
ROWS = 6
WEIGHT = np.array([1, 1, 0, 1, 0, 1], np.float32)
every_task = pytest.mark.parametrize("name", TASKS)


def make_batch(task):
    rng = np.random.default_rng(0)
    if isinstance(task, GPT):
        mask = (rng.random((ROWS, 6)) < 0.8).astype(np.float32)
        return {"tokens": rng.integers(0, 11, (ROWS, 7)).astype(np.int32), "mask": mask, "weight": WEIGHT}
    image = rng.normal(size=(ROWS, 8, 8, 1)).astype(np.float32)
    return {"image": image, "label": rng.integers(0, 3, ROWS).astype(np.int32), "weight": WEIGHT}


@lru_cache
def start(task):
    """Parameters drawn by NumPy, of the right shapes, none of them exactly 0; and a model state."""
    params, model_state = jax.eval_shape(task.init, jax.random.key(0))
    rng = np.random.default_rng(1)
    params = jax.tree.map(lambda leaf: rng.normal(0.1, 0.3, leaf.shape).astype(leaf.dtype), params)
    return params, jax.tree.map(lambda leaf: np.full(leaf.shape, 0.5, leaf.dtype), model_state)


@lru_cache
def compiled(task):
    """(loss with gradient, evaluation) as compiled functions."""

    def loss(params, model_state, batch, key):
        return task.loss(params, model_state, batch, key=key, axes=())

    return jax.jit(jax.value_and_grad(loss, has_aux=True)), jax.jit(task.evaluate)


def train_pass(task, batch, seed=0):
    return jax.device_get(compiled(task)[0](*start(task), batch, jax.random.key(seed)))


def evaluation(task, batch):
    return jax.device_get(compiled(task)[1](*start(task), batch))


def assert_same_bits(one, other):
    jax.tree.map(np.testing.assert_array_equal, one, other)


@every_task
def test_satisfies_the_protocol(name):
    task = TASKS[name]
    assert isinstance(task, Task)
    params, model_state = start(task)
    for path, leaf in jax.tree_util.tree_leaves_with_path((params, model_state)):
        assert all(isinstance(key.key, str) for key in path[1:]), path
        assert leaf.dtype == jnp.float32, path
    assert (model_state != {}) == (name == "resnet")
    (loss, parts), gradient = train_pass(task, make_batch(task))
    assert (loss.dtype, loss.shape) == (np.float32, ())
    assert loss > 0
    assert jax.tree.structure(gradient) == jax.tree.structure(params)
    assert (parts.statistics != ()) == (name == "resnet")
    assert list(parts.metrics) == ([] if name == "gpt" else ["accuracy"])


@every_task
def test_every_parameter_has_a_gradient(name):
    _, gradient = train_pass(TASKS[name], make_batch(TASKS[name]))
    for path, leaf in jax.tree_util.tree_leaves_with_path(gradient):
        is_key_bias = [key.key for key in path[-2:]] == ["key", "bias"]  # true gradient zero: softmax ignores it
        assert is_key_bias or np.abs(leaf).max() > 0, path


@every_task
def test_initial_parameters_depend_on_the_key_alone(name):
    init = jax.jit(TASKS[name].init)
    first, again, other = (init(jax.random.key(seed)) for seed in (1, 1, 2))
    assert_same_bits(first, again)
    differ = [bool((a != b).any()) for a, b in zip(jax.tree.leaves(first[0]), jax.tree.leaves(other[0]), strict=True)]
    assert sum(differ) >= 3  # all kernels; norms and biases start as constants


@every_task
@pytest.mark.parametrize("bad", [0, 1e6, np.nan])
def test_padding_rows_do_not_matter(name, bad):
    task, batch = TASKS[name], make_batch(TASKS[name])
    spoiled = {key: value.copy() for key, value in batch.items()}
    for key in spoiled.keys() - {"weight"}:
        spoiled[key][WEIGHT == 0] = bad if spoiled[key].dtype == np.float32 else -7
    assert_same_bits(train_pass(task, spoiled), train_pass(task, batch))
    assert_same_bits(evaluation(task, spoiled), evaluation(task, batch))
    assert_same_bits(task.weight(spoiled), task.weight(batch))


@every_task
def test_a_real_row_that_is_not_finite_stays_visible(name):
    task, batch = TASKS[name], make_batch(TASKS[name])
    if isinstance(task, GPT):
        batch["tokens"][1, 3] = 11
    else:
        batch["image"][1, 2, 2, 0] = np.nan
    assert np.isnan(train_pass(task, batch)[0][0])


@every_task
def test_a_batch_of_padding_alone_contributes_nothing(name):
    task, batch = TASKS[name], make_batch(TASKS[name])
    batch["weight"] = np.zeros(ROWS, np.float32)
    (loss, parts), gradient = train_pass(task, batch)
    assert (loss, task.weight(batch)) == (0, 0)
    assert not any(leaf.any() for leaf in jax.tree.leaves((gradient, parts)))
    _, model_state = start(task)
    assert_same_bits(task.next_model_state(model_state, parts.statistics), model_state)


@every_task
def test_dropout_follows_the_key(name):
    task, batch = TASKS[name], make_batch(TASKS[name])
    (first, _), _ = train_pass(task, batch, seed=1)
    assert first == train_pass(task, batch, seed=1)[0][0]
    assert first != train_pass(task, batch, seed=2)[0][0]


@every_task
def test_evaluation_drops_nothing(name):
    task, batch = TASKS[name], make_batch(TASKS[name])
    assert_same_bits(evaluation(task, batch), evaluation(replace(task, dropout=0.0), batch))


@every_task
def test_evaluation_adds_up_over_parts(name):
    """Also shows that batch-norm then looks at no other row."""
    task, batch = TASKS[name], make_batch(TASKS[name])
    whole = evaluation(task, batch)
    assert set(whole) == {"loss", "accuracy"}
    total = jax.tree.map(np.zeros_like, whole)
    for row in range(ROWS):
        part = {**batch, "weight": np.where(np.arange(ROWS) == row, WEIGHT, 0).astype(np.float32)}
        total = jax.tree.map(np.add, total, evaluation(task, part))
    np.testing.assert_allclose(total["loss"], whole["loss"], rtol=1e-6)
    np.testing.assert_allclose(total["accuracy"], whole["accuracy"])
    assert whole["loss"][1] == task.weight(batch)


@pytest.mark.parametrize("name", ["mlp", "vit", "gpt"])
def test_bfloat16_gradients_are_float32_and_near(name):
    exact = replace(TASKS[name], dropout=0.0)
    half = replace(exact, compute_dtype="bfloat16")
    batch = make_batch(exact)
    (loss, _), gradient = train_pass(exact, batch)
    (half_loss, _), half_gradient = train_pass(half, batch)
    assert half_loss.dtype == np.float32
    assert half_loss != loss
    np.testing.assert_allclose(half_loss, loss, rtol=0.01)
    scale = max(np.linalg.norm(leaf) for leaf in jax.tree.leaves(gradient))
    for ours, expected in zip(jax.tree.leaves(half_gradient), jax.tree.leaves(gradient), strict=True):
        assert ours.dtype == np.float32
        # By norm of the leaf; bfloat16 keeps 8 bits. Measured 0.016 for gpt, less for the others.
        assert np.linalg.norm(ours - expected) <= 0.03 * (np.linalg.norm(expected) + 0.1 * scale)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: ViTClassifier(**{**VIT, "num_heads": 3}), "width = 8 is not a multiple of num_heads = 3"),
        (lambda: ViTClassifier(**{**VIT, "patch_size": 3}), "image_size = 8 is not a multiple of patch_size = 3"),
        (lambda: ViTClassifier(**VIT, pooling="max"), "pooling = 'max': must be one of 'mean', 'cls'"),
        (lambda: ViTClassifier(**VIT, mlp_ratio=0), "mlp_ratio = 0: must be a finite number above 0"),
        (lambda: MLPClassifier(**IMAGE, hidden=[8, 0]), r"hidden\[1\] = 0: must be a whole number, 1 or more"),
        (lambda: MLPClassifier(**IMAGE, hidden=8), "hidden = 8: must be a list"),
        (lambda: MLPClassifier(**IMAGE, dropout=1.0), "dropout = 1.0: must be a number from 0"),
        (lambda: MLPClassifier(**IMAGE, compute_dtype="fp16"), "compute_dtype = 'fp16': must be one of 'float32'"),
        (lambda: MLPClassifier(**IMAGE, random_shift=-1), "random_shift = -1: must be a whole number, 0 or more"),
        (lambda: MLPClassifier(**{**IMAGE, "num_classes": 2.5}), "num_classes = 2.5: must be a whole number"),
        (lambda: ResNetClassifier(**IMAGE, depth=19), "depth = 19: must be one of 18, 34, 50"),
        (lambda: ResNetClassifier(**IMAGE, stem="big"), "stem = 'big': must be one of 'cifar', 'imagenet'"),
        (lambda: ResNetClassifier(**IMAGE, batch_norm_scope="local"), "batch_norm_scope = 'local': must be one of"),
        (lambda: GPT(**{**TEXT, "num_heads": 3}), "width = 8 is not a multiple of num_heads = 3"),
        (lambda: GPT(**{**TEXT, "context_length": 0}), "context_length = 0: must be a whole number, 1 or more"),
        (lambda: GPT(**TEXT, tie_embeddings=1), "tie_embeddings = 1: must be true or false"),
    ],
)
def test_settings_that_make_no_sense_are_refused_in_one_line(make, message):
    with pytest.raises(ValueError, match=message) as refusal:
        make()
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("mlp", {"image": np.zeros((ROWS, 9, 8, 1), np.float32)}, r"images of shape \(9, 8, 1\), but .*image_size = 8"),
        ("vit", {"image": None}, "needs image in each batch, but .* gives label, weight"),
        ("gpt", {"tokens": np.zeros((ROWS, 8), np.int32)}, "rows of 8 tokens, but .*context_length = 6 allows 2 to 7"),
        ("gpt", {"tokens": None}, "needs tokens in each batch"),
    ],
)
def test_batches_that_do_not_fit_are_refused(name, change, message):
    task = TASKS[name]
    batch = {key: value for key, value in {**make_batch(task), **change}.items() if value is not None}
    with pytest.raises(ValueError, match=message):
        jax.eval_shape(task.evaluate, *start(task), batch)


def num_params(task):
    params, _ = jax.eval_shape(task.init, jax.random.key(0))
    return sum(leaf.size for leaf in jax.tree.leaves(params))


@pytest.mark.parametrize(
    ("task", "expected"),
    [
        (MLPClassifier(image_size=8, channels=1, num_classes=10), 64 * 256 + 256 + 256 * 256 + 256 + 256 * 10 + 10),
        (ResNetClassifier(image_size=32, num_classes=10), 11_173_962),
        (ResNetClassifier(image_size=224, num_classes=1000, depth=34, stem="imagenet"), 21_797_672),
        (ResNetClassifier(image_size=224, num_classes=1000, depth=50, stem="imagenet"), 25_557_032),
        (
            ViTClassifier(
                image_size=224, patch_size=16, width=768, depth=12, num_heads=12, num_classes=1000, pooling="cls"
            ),
            86_567_656,
        ),
        (GPT(vocab_size=50257, context_length=1024, width=768, depth=12, num_heads=12), 124_439_808),
    ],
)
def test_published_parameter_counts(task, expected):
    assert num_params(task) == expected


def test_building_a_task_starts_no_backend():
    """With a platform that does not exist, anything that asks for a backend fails."""
    program = (
        "import jax; from models.resnet import ResNetClassifier; from models.gpt import GPT\n"
        "task = ResNetClassifier(image_size=8, num_classes=3)\n"
        "GPT(vocab_size=9, context_length=4, width=4, depth=1, num_heads=1)\n"
        "key = jax.eval_shape(lambda: jax.random.key(0))\n"
        "params, state = jax.eval_shape(task.init, key)\n"
        "shape = lambda dtype, *dims: jax.ShapeDtypeStruct(dims, dtype)\n"
        "batch = {'image': shape('float32', 2, 8, 8, 3), 'label': shape('int32', 2), 'weight': shape('float32', 2)}\n"
        "jax.eval_shape(lambda *a: task.loss(*a[:3], key=a[3], axes=()), params, state, batch, key)\n"
        "try: jax.devices()\n"
        "except RuntimeError: print('no backend, and none was needed')\n"
    )
    env = {**os.environ, "JAX_PLATFORMS": "none_such"}
    result = subprocess.run([sys.executable, "-c", program], env=env, capture_output=True, text=True, check=True)
    assert "none was needed" in result.stdout
