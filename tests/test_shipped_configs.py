"""The shipped configurations: each loads, round-trips and takes two steps, and says in its header what to expect."""

import json
from pathlib import Path

import jax
import numpy as np
import pytest
from PIL import Image

import configs
from trainer import assembly, config_file, loop, metrics
from trainer.rundir import RunDir

DIRECTORY = Path(configs.__file__).parent
PATHS = sorted(DIRECTORY.glob("*.toml"))
CUT_DOWN = {
    "vit_b16_two_nodes": [
        'mesh.platform="cpu"',
        "mesh.devices_per_node=4",
        "task.args.depth=1",
        "task.args.width=32",
        "task.args.num_heads=2",
        "task.args.image_size=32",
        "task.args.num_classes=2",
        "data.args.image_size=32",
        "data.global_batch=16",
    ]
}
"""What makes a configuration for a cluster fit this machine; it keeps its optimizer, schedule, dtype and source."""


def test_there_are_the_promised_ones():
    promised = {"digits_vit", "digits_mlp", "digits_resnet", "text_gpt", "vit_b16_two_nodes"}
    assert promised <= {path.stem for path in PATHS}


@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.stem)
def test_it_round_trips_and_its_header_makes_its_promise(path, tmp_path):
    config = config_file.load(path)
    (tmp_path / "again.toml").write_text(config_file.dump(config))
    assert config_file.load(tmp_path / "again.toml") == config
    assert config.run.name == path.stem
    header = [line for line in path.read_text().splitlines() if line.startswith("#")]
    for word in ("command:", "hardware:", "time:", "result:"):
        assert any(word in line for line in header), word


@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.stem)
def test_it_takes_two_steps(path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for folder in ("train/cat", "train/dog", "test/cat", "test/dog"):
        target = tmp_path / "imagenet" / folder
        target.mkdir(parents=True)
        for index in range(8):
            pixels = np.random.default_rng(index).integers(0, 255, (40, 40, 3), np.uint8)
            Image.fromarray(pixels).save(target / f"{index}.png")
    short = ["run.num_steps=2", "optimizer.warmup_steps=1", "observe.log_every_steps=1"]
    if "text" in path.stem:
        short.append("data.args.max_bytes=100_000")
    config = config_file.load(path, [*CUT_DOWN.get(path.stem, []), *short])
    run_dir, attempt = RunDir.open(tmp_path / "run")
    loop.run(config, run_dir, attempt, None)
    rows = metrics.read(run_dir.metrics)
    assert [row["step"] for row in rows if row["kind"] == "train"] == [1, 2]
    assert all(np.isfinite(row["loss"]) for row in rows)
    json.dumps(rows, allow_nan=False)


def test_the_two_node_workload_has_the_shapes_it_was_conceived_for():
    config = config_file.load(DIRECTORY / "vit_b16_two_nodes.toml")
    task = assembly.build_task(config)
    params, _ = jax.eval_shape(lambda: task.init(jax.random.key(0)))
    leaves = jax.tree.leaves(params)
    assert sum(leaf.size for leaf in leaves) == 86_567_656
    assert {leaf.dtype for leaf in leaves} == {np.dtype(np.float32)}
    assert (config.mesh.nodes, config.mesh.num_devices) == (2, 16)
