"""Checkpoints are complete and verified or not there: what is damaged is named and passed over, and never executed."""

import functools
import json
import os
import re
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from toy import Perceptron, mesh_of

from trainer import optimizer as optimizers
from trainer import sync
from trainer.checkpoint import catalog, manifest, store
from trainer.checkpoint.catalog import Retention
from trainer.checkpoint.store import Checkpoints
from trainer.config import Checkpoint, Config, Optimizer
from trainer.errors import InputRefused
from trainer.resilience import progress
from trainer.resilience.progress import Block
from trainer.rundir import RunDir
from trainer.state import Parts, TrainState, abstract, create_on_mesh
from trainer.sync import SyncState


def parts_of(mesh, *, num_inputs=5, optimizer="adamw", residuals="", start=1.0):
    """A perceptron's parts; ``residuals`` is the field of SyncState that the exchange keeps one in, if any."""
    task = Perceptron(num_inputs=num_inputs)
    params = jax.eval_shape(lambda: task.init(jax.random.key(0))[0])
    trainable = optimizers.trainable_mask(params, ())
    owners = {"by_node": mesh.shape["node"], "by_replica": mesh.size, "": 0}[residuals]

    def init(params):
        rows = start + jnp.arange(float(owners))
        kept = jax.tree.map(lambda leaf: jnp.ones((owners, *leaf.shape)) * rows.reshape(-1, *[1] * leaf.ndim), params)
        return (SyncState(**{residuals: kept}), optax.EmptyState()) if residuals else sync.all_reduce(mesh).init(params)

    exchange = optax.GradientTransformation(init, sync.all_reduce(mesh).update)
    return Parts(task, optimizers.build(Optimizer(name=optimizer), 100, params), exchange, trainable)


def shapes_on(nodes, local, **options):
    """The shapes of a state on a mesh of the emulated devices."""
    mesh = mesh_of(nodes, local)
    return abstract(parts_of(mesh, **options), mesh)


@functools.cache
def state_of(seed=0, **options):
    """A state on 2 nodes x 4 devices, as every checkpoint here is saved."""
    mesh, shapes = mesh_of(2, 4), shapes_on(2, 4, **options)
    return jax.device_put(create_on_mesh(parts_of(mesh, **options), mesh, seed), shardings(shapes))


def at_step(step, seed=0, **options):
    """The same, its counter at ``step``."""
    state = state_of(seed, **options)
    return state._replace(step=jax.device_put(jnp.int32(step), state.step.sharding))


def shardings(shapes):
    return jax.tree.map(lambda leaf: leaf.sharding, shapes)


def saved_steps(directory, *steps, retention=Retention(keep=99), **options):  # noqa: B008 # a tuple
    """Saves states of ``steps`` into ``directory``, by one seed or another; returns the last one."""
    checkpoints = Checkpoints(directory, retention=retention, run_id=options.pop("run_id", ""))
    for step in steps:
        state = at_step(step, seed=step % 2, **options)
        checkpoints.save(state, {"next_batch": step}, {})
    checkpoints.close()
    return state


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A directory with checkpoints of steps 1 and 2, and the shapes of their state."""
    directory = tmp_path_factory.mktemp("saved") / "checkpoints"
    saved_steps(directory, 1, 2)
    return directory, shapes_on(2, 4)


@pytest.fixture
def copy(saved, tmp_path):
    shutil.copytree(saved[0], tmp_path / "checkpoints")
    return tmp_path / "checkpoints"


def restored(directory, shapes, step=1):
    checkpoints = Checkpoints(directory, create=False)
    try:
        return checkpoints.restore(step, shapes)
    finally:
        checkpoints.close()


def files_of(checkpoint):
    return sorted(path for path in checkpoint.rglob("*") if path.is_file())


KINDS = [
    *("_CHECKPOINT_METADATA", "commit_success.txt", "data/metadata", "meta/metadata", "manifest.json"),
    *("params/_METADATA", "params/_sharding", "params/array_metadatas/process_0", "params/manifest.ocdbt"),
    *("params/d/*", "params/ocdbt.process_0/d/*", "params/ocdbt.process_0/manifest.ocdbt"),
]
"""One file of each kind within a checkpoint."""


def test_the_kinds_are_all_there_are(saved):
    names = {path.relative_to(saved[0] / "2").as_posix() for path in files_of(saved[0] / "2")}
    known = {path.relative_to(saved[0] / "2") for kind in KINDS for path in (saved[0] / "2").glob(kind)}
    tails = {(name.parts[1:] if len(name.parts) > 1 else name.parts)[0] for name in known}
    for name in names:
        parts = Path(name).parts
        assert (parts[1:] if len(parts) > 1 else parts)[0] in tails, name


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("damage", ["flipped", "truncated", "missing"])
def test_damage_is_named_and_the_one_before_is_taken(copy, kind, damage):
    file = sorted((copy / "2").glob(kind))[0]
    content = file.read_bytes()
    if damage == "flipped":
        middle = len(content) // 2
        file.write_bytes(content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :])
    elif damage == "truncated":
        file.write_bytes(content[:-1])
    else:
        file.unlink()
    found = catalog.select(copy)
    assert found.step == 1
    (warning,) = found.warnings
    assert "checkpoints/2 is passed over" in warning
    assert file.relative_to(copy / "2").as_posix() in warning
    assert "\n" not in warning


def test_an_empty_directory_and_other_things_named_like_steps_are_passed_over(copy):
    (copy / "300").mkdir()
    (copy / "301").write_text("")
    (copy / "007").mkdir()
    (copy / "302.orbax-checkpoint-tmp-1").mkdir()
    found = catalog.select(copy)
    assert found.step == 2
    assert len(found.warnings) == 2
    assert "301 is passed over: it is no directory" in found.warnings[0]
    assert "300 is passed over: it has no manifest.json" in found.warnings[1]


def test_a_pipe_for_a_manifest_is_damage_and_holds_nobody_up(copy):
    (copy / "2" / "manifest.json").unlink()
    os.mkfifo(copy / "2" / "manifest.json")
    found = catalog.select(copy)
    assert found.step == 1
    assert "manifest.json is no regular file" in found.warnings[0]


def test_what_a_save_left_when_it_was_cut_off_is_no_checkpoint_and_does_not_stay(copy):
    (copy / "2" / "manifest.json").unlink()
    (copy / "3.orbax-checkpoint-tmp").mkdir()
    checkpoints = Checkpoints(copy)
    assert checkpoints.select().step == 1
    checkpoints.remove_leftovers()
    assert sorted(entry.name for entry in copy.iterdir()) == ["1", "2"]
    checkpoints.save(at_step(2), {}, {})  # in the place of the unfinished one
    checkpoints.close()
    assert [entry.status for entry in catalog.entries(copy, checksums=True)] == ["good"]


def test_when_all_are_damaged_nothing_starts_afresh_in_silence(copy):
    for step in ("1", "2"):
        (copy / step / "meta" / "metadata").write_text("")
    with pytest.raises(InputRefused, match=r"no good checkpoint \(2: meta/metadata has 0 bytes .*; 1: .*remove them"):
        Checkpoints(copy, create=False).select()
    for step in ("1", "2"):
        (copy / step / "manifest.json").unlink()
    assert catalog.select(copy).step is None


def test_nothing_that_is_read_is_run_and_nothing_outside_is_read(copy, saved, tmp_path):
    """A pickle that writes a file when it is loaded, in the place of every file; the manifest is made to fit."""
    proof = tmp_path / "proof"
    pickle = f"cposix\nsystem\n(S'touch {proof}'\ntR.".encode()
    done = subprocess.run([sys.executable, "-c", f"import pickle\npickle.loads({pickle!r})"], check=True)
    assert done.returncode == 0
    assert proof.exists(), "the pickle is no threat, so the test shows nothing"
    proof.unlink()
    for file in files_of(copy / "2"):
        original = file.read_bytes()
        file.write_bytes(pickle)
        assert catalog.select(copy).step == 1, file
        if file.name != "manifest.json":
            (copy / "2" / "manifest.json").unlink()
            manifest.write(copy / "2", 2, "")
            assert catalog.select(copy).step == 2
        file.write_bytes(original)

    reader = Path(__file__).with_name("checkpoint_reader.py")
    planted = [str(file) for file in files_of(copy / "2") if file.name != "manifest.json"]
    told = subprocess.run(
        [sys.executable, reader, copy / "2", *planted], input=pickle, capture_output=True, timeout=240
    )
    assert told.returncode == 0, told.stderr.decode()[-2000:]
    lines = told.stdout.decode().splitlines()
    assert len(lines) == len(planted)
    assert {line.rpartition(" ")[0] for line in lines} == {"read", "refused in 1 line"}
    assert not proof.exists()


@pytest.mark.parametrize("place", ["2", "2/params", "2/params/d", "2/meta/metadata"])
def test_links_are_refused(copy, tmp_path, place):
    shutil.move(copy / place, tmp_path / "elsewhere")
    (copy / place).symlink_to(tmp_path / "elsewhere")
    found = catalog.select(copy)
    assert found.step == 1
    assert "symbolic link" in found.warnings[0]
    checkpoints = Checkpoints(copy)
    checkpoints.save(at_step(3), {}, {})
    checkpoints.close()
    assert (tmp_path / "elsewhere").exists(), "a link is not followed when what it stands in is deleted"


def test_a_directory_that_leads_out_of_the_run_is_refused(tmp_path):
    run_dir = RunDir(tmp_path / "run")
    run_dir.path.mkdir()
    (tmp_path / "far").mkdir()
    run_dir.checkpoints.symlink_to(tmp_path / "far")

    def config(directory):
        tree = {"task": {"target": "a:B"}, "data": {"source": "digits", "global_batch": 8}}
        return Config.model_validate({**tree, "checkpoint": {"directory": directory}})

    with pytest.raises(InputRefused, match=r"checkpoints leads out of the run directory .*set checkpoint.directory"):
        catalog.directory_of(config(""), run_dir)
    assert catalog.directory_of(config(str(tmp_path / "far")), run_dir) == str(tmp_path / "far")
    assert catalog.directory_of(config("inside"), run_dir) == str(run_dir.path / "inside")
    assert catalog.directory_of(config("gs://bucket/x"), run_dir) == "gs://bucket/x"


def test_the_newest_and_the_best_stay(tmp_path):
    scores = {2: 0.3, 4: 0.1, 6: float("nan"), 8: 0.2, 10: None}
    steps = [2, 3, 4, 5, 6, 7, 8, 10]
    assert catalog.kept(steps, Retention(keep=2), scores) == {8, 10}
    assert catalog.kept(steps, Retention(keep=1, keep_best=1), scores) == {4, 10}
    assert catalog.kept(steps, Retention(keep=1, keep_best=3), scores) == {4, 5, 8, 10}
    assert catalog.kept(steps, Retention(keep=1, keep_best=1, mode="max"), scores) == {2, 10}
    assert catalog.kept(steps, Retention(keep=1, keep_best=99), {}) == {10}

    checkpoints = Checkpoints(tmp_path / "c", retention=Retention(keep=1, keep_best=1))
    for step, score in ((1, 0.5), (2, 0.1), (3, 0.9), (4, 0.8)):
        checkpoints.save(at_step(step), {}, {})
        checkpoints.note_scores({step: score})
    checkpoints.close()
    assert [entry.step for entry in catalog.entries(tmp_path / "c", checksums=True)] == [4, 2]


def test_a_good_one_never_goes_before_a_newer_good_one_is_there(copy, monkeypatch):
    """The write of the newest fails at each point in turn; what was there stays, and can be restored."""
    checkpoints = Checkpoints(copy, retention=Retention(keep=1))

    def fail(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(store.manifest, "write", fail)
    checkpoints.save(at_step(3), {}, {})
    with pytest.raises(InputRefused, match=r"step 3 could not be written .*No space left on device; step 2 is intact"):
        checkpoints.wait()
    assert [entry.status for entry in catalog.entries(copy, checksums=True)] == ["unfinished", "good", "good"]
    monkeypatch.undo()
    checkpoints.save(at_step(3), {}, {})
    checkpoints.close()
    assert [entry.step for entry in catalog.entries(copy, checksums=True)] == [3]


def test_a_save_is_told_once_it_is_complete_and_never_if_it_failed(copy, monkeypatch):
    told, may_write, write = [], threading.Event(), store.manifest.write

    def when_allowed(path, *arguments):
        assert may_write.wait(60)
        if path.name == "4":
            raise OSError(28, "No space left on device")
        write(path, *arguments)

    def on_saved(step, seconds):
        told.append((step, seconds, (copy / str(step) / manifest.NAME).is_file(), threading.current_thread()))

    monkeypatch.setattr(store.manifest, "write", when_allowed)
    checkpoints = Checkpoints(copy, on_saved=on_saved)
    checkpoints.save(at_step(3), {}, {})
    checkpoints.check()
    assert not told
    may_write.set()
    checkpoints.save(at_step(4), {}, {})
    ((step, seconds, is_complete, thread),) = told
    assert (step, is_complete, thread) == (3, True, threading.current_thread())
    assert seconds > 0
    with pytest.raises(InputRefused, match="step 4 could not be written"):
        checkpoints.close()
    assert len(told) == 1


def test_a_failed_write_is_told_at_a_following_step(copy, monkeypatch):
    def fail(*_):
        raise ValueError("RESOURCE_EXHAUSTED: Failed to write 1 bytes: Disk quota exceeded [os_error_code='122']")

    checkpoints = Checkpoints(copy)
    monkeypatch.setattr(store.manifest, "write", fail)
    checkpoints.save(at_step(3), {}, {})
    deadline = time.monotonic() + 60

    def check_until_told():
        while time.monotonic() < deadline:
            checkpoints.check()

    with pytest.raises(InputRefused, match=r"step 3 could not be written to .*: Disk quota exceeded; step 2 is intact"):
        check_until_told()
    monkeypatch.undo()
    checkpoints.close()


def test_a_directory_that_is_removed_under_the_run_is_told(tmp_path):
    checkpoints = Checkpoints(tmp_path / "c")
    shutil.rmtree(tmp_path / "c")
    with pytest.raises(
        InputRefused, match=r"step 1 could not be written .*the directory is gone; there is none before"
    ):
        checkpoints.save(at_step(1), {}, {})


def test_a_directory_that_is_replaced_under_the_run_is_told_and_left_alone(tmp_path):
    checkpoints = Checkpoints(tmp_path / "c")
    checkpoints.save(at_step(1), {}, {})
    checkpoints.wait()
    shutil.rmtree(tmp_path / "c")
    (tmp_path / "c").mkdir()
    with pytest.raises(InputRefused, match=r"step 2 .*the directory is gone, and another stands in its place; there"):
        checkpoints.save(at_step(2), {}, {})
    checkpoints.close()
    assert not any((tmp_path / "c").iterdir())


def test_a_directory_that_is_replaced_during_a_save_is_told(tmp_path, monkeypatch):
    checkpoints = Checkpoints(tmp_path / "c")
    written = checkpoints._orbax.wait_until_finished

    def replace():
        written()
        (tmp_path / "c").rename(tmp_path / "old")
        shutil.copytree(tmp_path / "old", tmp_path / "c")

    monkeypatch.setattr(checkpoints._orbax, "wait_until_finished", replace)
    checkpoints.save(at_step(1), {}, {})
    with pytest.raises(InputRefused, match=r"step 1 could not be written .*another stands in its place"):
        checkpoints.wait()
    monkeypatch.undo()
    checkpoints.close()
    assert [entry.status for entry in catalog.entries(tmp_path / "c")] == ["unfinished"]


def test_what_is_complete_is_marked_for_the_agent(tmp_path):
    with Block() as block:
        progress.attach(os.dup(block.fd))
        saved_steps(tmp_path / "c", 3, 5)
        assert block.marks().saved == 5
        progress.attach(os.dup(block.fd)).saved(0)
        Checkpoints(tmp_path / "c", create=False).select()
        assert block.marks().saved == 5


def test_going_back_abandons_later_steps_until_they_are_overtaken(tmp_path):
    saved_steps(tmp_path, 1, 2, 3, 4, run_id="a")
    with pytest.raises(InputRefused, match="no checkpoint of step 7; there are: 1, 2, 3, 4"):
        catalog.go_back(tmp_path, 7)
    with pytest.raises(InputRefused, match=r"4 was written by another run \(a, not b\)"):
        catalog.select(tmp_path, "b")
    assert catalog.go_back(tmp_path, 2, "a") == [3, 4]
    assert catalog.select(tmp_path, "a").step == 2
    saved_steps(tmp_path, 3, run_id="a")
    assert [(entry.step, entry.status) for entry in catalog.entries(tmp_path)] == [
        (4, "abandoned"),
        (3, "good"),
        (2, "good"),
        (1, "good"),
    ]
    saved_steps(tmp_path, 4, 5, run_id="a", retention=Retention(keep=2))
    assert [entry.step for entry in catalog.entries(tmp_path, checksums=True) if entry.is_good] == [5, 4]


@pytest.mark.parametrize(("version", "remedy"), [(1, "the version of Lockstep that wrote it"), (99, "install that")])
def test_another_format_is_refused_and_not_passed_over(copy, version, remedy):
    path = copy / "2" / "manifest.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "format_version": version}))
    with pytest.raises(InputRefused, match=f"2 has format version {version}; this version reads 2; .*{remedy}"):
        catalog.select(copy)


def test_what_is_saved_is_the_moment_of_the_save(tmp_path):
    """The state is donated to the next steps, and so overwritten, while it is being written."""
    state = jax.device_put(jax.device_get(at_step(1)), shardings(shapes_on(2, 4)))
    expected = jax.device_get(state.params)
    scale = jax.jit(lambda state: jax.tree.map(lambda leaf: leaf * 2, state), donate_argnums=0)
    checkpoints = Checkpoints(tmp_path / "c")
    checkpoints.save(state, {}, {})
    for _ in range(5):
        state = scale(state)
    jax.block_until_ready(state)
    checkpoints.close()
    jax.tree.map(np.testing.assert_array_equal, restored(tmp_path / "c", shapes_on(2, 4)).state.params, expected)


def test_every_part_of_the_state_comes_back(tmp_path):
    state, shapes = saved_steps(tmp_path / "c", 3, residuals="by_replica"), shapes_on(2, 4, residuals="by_replica")
    assert {*store.ARRAYS, *store.COUNTERS} == set(TrainState._fields)
    found = restored(tmp_path / "c", shapes, 3)
    assert found.residuals is None
    assert jax.tree.structure(found.state) == jax.tree.structure(state)
    for back, leaf in zip(jax.tree.leaves(found.state), jax.tree.leaves(state), strict=True):
        assert back.sharding == leaf.sharding
        np.testing.assert_array_equal(back, leaf)


@pytest.mark.parametrize(("field", "before", "meshes"), [
    ("by_node", 2, {(1, 4): 1, (4, 1): 4, (3, 1): 3, (2, 1): 2}),
    ("by_replica", 8, {(1, 3): 3, (2, 2): 4, (4, 2): 8}),
])  # fmt: skip
def test_residuals_follow_their_owners(tmp_path, field, before, meshes):
    """Saved by 2 nodes x 4 replicas. The mean is what still has to reach the parameters, so it must not change."""
    state = saved_steps(tmp_path, 1, residuals=field)
    for mesh, owners in meshes.items():
        found = restored(tmp_path, shapes_on(*mesh, residuals=field))
        assert found.residuals == ((before, owners) if before != owners else None)
        for leaf, old in zip(
            *(jax.tree.leaves(getattr(one.sync[0], field)) for one in (found.state, state)), strict=True
        ):
            assert leaf.shape[0] == owners
            expected = old if before == owners else jnp.broadcast_to(jnp.mean(old, axis=0), leaf.shape)
            np.testing.assert_array_equal(leaf, expected)
        jax.tree.map(np.testing.assert_array_equal, jax.device_get(found.state.params), jax.device_get(state.params))


@pytest.mark.parametrize(
    ("options", "what", "lines", "fits"),
    [
        (
            {"num_inputs": 6},
            "model",
            ["params/hidden/kernel: float32[5, 8] in the checkpoint, float32[6, 8] here"],
            False,
        ),
        ({"optimizer": "sgd"}, "optimizer", ["optimizer/.*: int32[] in the checkpoint, absent here"], True),
        (
            {"residuals": "by_node"},
            "exchange",
            ["sync/0/by_node/out/bias: absent in the checkpoint, float32[2, 1] here"],
            True,
        ),
    ],
)
def test_what_does_not_fit_is_said_and_listed_with_both_shapes(saved, options, what, lines, fits):
    shapes = shapes_on(2, 4, **options)
    with pytest.raises(InputRefused) as refusal:
        restored(saved[0], shapes)
    text = str(refusal.value)
    matter, *listed, _ = text.splitlines()
    found = re.fullmatch(rf"{saved[0]}/1 is of another {what} than these settings make: (\d+) lea\w+ differs?", matter)
    assert found, matter
    assert len(listed) == int(found[1])
    for line in lines:
        name, _, rest = line.partition(": ")
        assert any(name.split(".*")[0] in leaf and rest in leaf for leaf in listed), text
    assert ("--init-from" in text.splitlines()[-1]) == fits


def test_the_parameters_alone_start_another_run(saved, tmp_path):
    mesh = mesh_of(2, 4)
    parts = parts_of(mesh, optimizer="sgd", residuals="by_node")
    path, params, model_state = store.parameters(str(saved[0]), abstract(parts, mesh))
    assert path == str(saved[0] / "2")
    state = create_on_mesh(parts, mesh, 0, (params, model_state))
    assert int(state.step) == 0
    expected = at_step(2).params
    jax.tree.map(np.testing.assert_array_equal, state.params, expected)
    assert store.parameters(str(saved[0] / "1"), abstract(parts, mesh))[0] == str(saved[0] / "1")
    with pytest.raises(InputRefused, match=r"init_from = .*holds no checkpoint: give a run directory"):
        store.parameters(str(tmp_path), abstract(parts, mesh))
    with pytest.raises(InputRefused, match=r"kernel: float32\[5, 8\] in the checkpoint, float32\[6, 8\] here"):
        store.parameters(str(saved[0]), abstract(parts_of(mesh, num_inputs=6), mesh))


@pytest.mark.parametrize("item", ["params", "optimizer", "data", "meta"])
def test_an_item_that_is_missing_when_it_is_read_is_named(copy, saved, item):
    shutil.rmtree(copy / "1" / item)
    with pytest.raises(InputRefused, match=f"1/{item} ") as refusal:
        restored(copy, saved[1])
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize("text", ["", "null", "{}"])
def test_a_meta_that_is_none_is_refused(copy, saved, text):
    (copy / "1" / "meta" / "metadata").write_text(text)
    with pytest.raises(InputRefused, match="1/meta "):
        restored(copy, saved[1])


@pytest.mark.parametrize("name", ["file", "file/below", "nosuchscheme://bucket/x"])
@pytest.mark.parametrize("create", [True, False])
def test_an_unusable_directory_is_refused(tmp_path, name, create):
    (tmp_path / "file").write_text("")
    directory = name if "://" in name else tmp_path / name
    with pytest.raises(InputRefused, match=r"checkpoint.directory = .*cannot be used: "):
        Checkpoints(directory, create=create)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can mount a file system read-only")
def test_a_file_system_that_cannot_be_written_is_told_before_training(tmp_path):
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m,ro", "none", str(tmp_path)], check=True)
    try:
        with pytest.raises(
            InputRefused, match=r"cannot be used: rank 0 on .* cannot write there: Read-only file system"
        ):
            Checkpoints(tmp_path)
    finally:
        subprocess.run(["umount", str(tmp_path)], check=True)


def test_a_marker_does_not_stay(tmp_path):
    Checkpoints(tmp_path / "c").close()
    assert not os.listdir(tmp_path / "c")


def test_settings_that_would_be_ignored_are_refused():
    with pytest.raises(ValueError, match="best_metric: would be ignored, because keep_best is 0"):
        Checkpoint(best_metric="accuracy")
    assert Checkpoint(best_metric="accuracy", keep_best=2).best_mode == "min"
