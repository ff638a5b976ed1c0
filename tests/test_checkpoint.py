"""Checkpoints that are damaged or cannot be written are refused in one line that names the path."""

import shutil

import pytest
from test_loop import run, settings

from trainer import assembly
from trainer.checkpoint import Checkpoints
from trainer.errors import InputRefused


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """The checkpoint directory of a run of one step, and the shapes of its state."""
    path = tmp_path_factory.mktemp("saved") / "run"
    config = settings(run={"num_steps": 1})
    run(config, path)
    return path / "checkpoints", assembly.assemble(config).shapes


def restored(directory, shapes):
    checkpoints = Checkpoints(directory, create=False)
    try:
        return checkpoints.restore(1, shapes)
    finally:
        checkpoints.close()


@pytest.mark.parametrize("item", ["params", "optimizer", "data", "meta"])
@pytest.mark.parametrize("damage", ["missing", "emptied"])
def test_a_damaged_item_is_named(saved, tmp_path, item, damage):
    directory = tmp_path / "checkpoints"
    shutil.copytree(saved[0], directory)
    shutil.rmtree(directory / "1" / item)
    if damage == "emptied":
        (directory / "1" / item).mkdir()
    with pytest.raises(InputRefused, match=f"1/{item} ") as refusal:
        restored(directory, saved[1])
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize("text", ["", "null", "{}"])
def test_a_meta_that_is_none_is_refused(saved, tmp_path, text):
    directory = tmp_path / "checkpoints"
    shutil.copytree(saved[0], directory)
    file = directory / "1" / "meta" / "metadata"
    assert file.is_file()
    file.write_text(text)
    with pytest.raises(InputRefused, match="1/meta "):
        restored(directory, saved[1])


def test_a_missing_item_is_named_when_it_is_read(saved, tmp_path):
    directory = tmp_path / "checkpoints"
    shutil.copytree(saved[0], directory)
    shutil.rmtree(directory / "1" / "params")
    checkpoints = Checkpoints(directory, create=False)
    with pytest.raises(InputRefused, match="1/params "):
        checkpoints.read(1, "params")
    checkpoints.close()


@pytest.mark.parametrize("name", ["file", "file/below", "nosuchscheme://bucket/x"])
@pytest.mark.parametrize("create", [True, False])
def test_an_unusable_directory_is_refused(tmp_path, name, create):
    (tmp_path / "file").write_text("")
    directory = name if "://" in name else tmp_path / name
    with pytest.raises(InputRefused, match=r"checkpoint.directory = .*cannot be used: "):
        Checkpoints(directory, create=create)
