"""The sources of one's own files: what they give, how they split, and how they refuse what is missing or damaged."""

from pathlib import Path

import numpy as np
import pytest
from data_cases import archive, arrayrecord_case, images_case, opened, refusal, write_image, write_npz, write_records
from PIL import Image

from trainer.data import evaluation_batches
from trainer.data.splits import held_out
from trainer.errors import InputRefused


def test_token_windows_share_one_token(tmp_path: Path) -> None:
    np.save(tmp_path / "t.npy", np.arange(10, dtype=np.int64))
    args = {"path": str(tmp_path / "t.npy"), "seq_len": 3}
    source = opened("tokens", args)
    assert [source[i]["tokens"].tolist() for i in range(len(source))] == [[0, 1, 2, 3], [3, 4, 5, 6], [6, 7, 8, 9]]
    assert len(opened("tokens", {**args, "seq_len": 9})) == 1
    assert "10 tokens, fewer than one window of data.args.seq_len + 1 = 11" in refusal(
        "tokens", {**args, "seq_len": 10}
    )
    assert len(opened("tokens", args, "test")) == 0
    with pytest.raises(InputRefused, match="test split has no examples"):
        evaluation_batches(opened("tokens", args, "test"), 8, slice(0, 8))


def test_tokens_are_mapped_not_read(tmp_path: Path) -> None:
    path = tmp_path / "large.bin"
    with path.open("wb") as file:
        file.truncate(2**36)  # a sparse file that no memory here could hold
    source = opened("tokens", {"path": str(path), "seq_len": 7, "dtype": "uint16"})
    assert len(source) == (2**35 - 1) // 7
    assert source[len(source) - 1]["tokens"].tolist() == [0] * 8


def test_tokens_outside_the_vocabulary_are_refused(tmp_path: Path) -> None:
    np.save(tmp_path / "t.npy", np.array([0, 1, 2, 9, 0, 1, 2, -1, 0], np.int64))
    args = {"path": str(tmp_path / "t.npy"), "seq_len": 4}
    assert len(opened("tokens", {**args, "vocab_size": 10})[0]["tokens"]) == 5
    assert "range from 0 to 9, outside 0 to 8" in refusal("tokens", {**args, "vocab_size": 9}, read=True)
    assert "range from -1 to 2, outside 0 to 2147483646" in refusal("tokens", args, read=True)


def test_damaged_tokens_are_refused(tmp_path: Path) -> None:
    raw, npy, float_npy = tmp_path / "a.bin", tmp_path / "a.npy", tmp_path / "f.npy"
    raw.write_bytes(b"12345")
    npy.write_bytes(b"\x93NUMPY")
    np.save(float_npy, np.zeros(100))
    np.save(tmp_path / "good.npy", np.zeros(100, np.uint8))
    args = {"seq_len": 4}
    assert "5 bytes, which is no whole number of uint16" in refusal(
        "tokens", {**args, "path": str(raw), "dtype": "uint16"}
    )
    assert "dtype is needed" in refusal("tokens", {**args, "path": str(raw)})
    assert "no readable .npy file" in refusal("tokens", {**args, "path": str(npy)})
    assert "float64 of shape (100,)" in refusal("tokens", {**args, "path": str(float_npy)})
    good = str(tmp_path / "good.npy")
    assert "says uint8: leave dtype out" in refusal("tokens", {**args, "path": good, "dtype": "int32"})
    assert "dtype = 'float32': Input should be 'uint8'" in refusal("tokens", {**args, "path": good, "dtype": "float32"})


def test_npz_keeps_names_and_values(tmp_path: Path) -> None:
    x, y = np.random.default_rng(0).normal(size=(10, 2, 3)), np.arange(10)
    source = opened("npz", {"path": write_npz(tmp_path / "a.npz", x=x, y=y)})
    assert len(source) == 10
    np.testing.assert_array_equal(source[7]["x"], x[7])
    parts = [
        opened("npz", {"path": str(tmp_path / "a.npz"), "test_fraction": 0.3}, split) for split in ("train", "test")
    ]
    assert [len(part) for part in parts] == [7, 3]
    assert sorted(int(part[i]["y"]) for part in parts for i in range(len(part))) == list(range(10))
    assert len(opened("npz", {"path": str(tmp_path / "a.npz")}, "test")) == 0


def test_a_path_is_relative_to_the_current_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_npz(tmp_path / "a.npz", x=np.arange(3))
    monkeypatch.chdir(tmp_path)
    assert len(opened("npz", {"path": "a.npz"})) == 3


def test_damaged_npz_is_refused(tmp_path: Path) -> None:
    good = Path(write_npz(tmp_path / "good.npz", x=np.random.default_rng(0).normal(size=(100, 10))))
    content = good.read_bytes()
    (tmp_path / "cut.npz").write_bytes(content[: len(content) // 2])
    (tmp_path / "flipped.npz").write_bytes(content[:500] + bytes([content[500] ^ 1]) + content[501:])
    (tmp_path / "empty.npz").write_bytes(b"")
    np.save(tmp_path / "single.npy", np.zeros(3))
    write_npz(tmp_path / "objects.npz", x=np.array([{}, {}], object))
    for name in ("cut.npz", "flipped.npz", "empty.npz", "single.npy", "objects.npz"):
        message = refusal("npz", {"path": str(tmp_path / name)})
        assert message.startswith(f"InputRefused: {tmp_path / name} is no readable .npz archive"), message


def test_npz_with_unequal_lengths_is_refused(tmp_path: Path) -> None:
    assert "x: 3, y: 4" in refusal("npz", {"path": write_npz(tmp_path / "a.npz", x=np.zeros(3), y=np.zeros(4))})
    assert "x: no dims" in refusal("npz", {"path": write_npz(tmp_path / "b.npz", x=np.zeros(()))})
    assert "no array" in refusal("npz", {"path": write_npz(tmp_path / "c.npz")})


def test_held_out_is_a_fixed_random_choice_of_the_asked_size() -> None:
    for num in (1, 9, 10, 11, 1000):
        train, test = held_out(num, 0.1, "train"), held_out(num, 0.1, "test")
        assert len(test) == round(num / 10)
        assert sorted([*train, *test]) == list(range(num))
    assert held_out(20, 0.2, "test").tolist() == [1, 8, 18, 19]


@pytest.mark.parametrize("source", ["npz", "tokens"])
def test_test_data_given_twice_or_not_apart_is_refused(source: str, tmp_path: Path) -> None:
    path = write_npz(tmp_path / "a.npz", x=np.zeros(3))
    more = {"seq_len": 2} if source == "tokens" else {}
    both = {"path": path, "test_path": path, "test_fraction": 0.5, **more}
    assert "exclude each other" in refusal(source, both)
    assert "nothing would be held out" in refusal(source, {"path": path, "test_path": path, **more})
    assert "test_fraction = 1.0: Input should be less than 1" in refusal(
        source, {"path": path, "test_fraction": 1.0, **more}
    )
    missing = {"path": path, "test_path": str(tmp_path / "none"), **more}
    assert refusal(source, missing).startswith("InputRefused: data.args.test_path")


def test_images_are_labelled_by_sorted_class_and_scaled(tmp_path: Path) -> None:
    for split, name, value in [("train", "b", 51), ("train", "a", 102), ("test", "b", 204)]:
        write_image(tmp_path / split / name / "1.png", value)
    (tmp_path / "train" / "a" / "notes.txt").write_text("no image")
    args = {"path": str(tmp_path), "image_size": 3}
    train, test = opened("images", args), opened("images", args, "test")
    assert [(int(train[i]["label"]), float(train[i]["image"][0, 0, 0])) for i in range(2)] == [
        (0, pytest.approx(0.4)),
        (1, pytest.approx(0.2)),
    ]
    assert (int(test[0]["label"]), float(test[0]["image"][2, 2, 0])) == (1, pytest.approx(0.8))
    assert (train[0]["image"].shape, train[0]["image"].dtype) == ((3, 3, 3), np.float32)
    grey = opened("images", {**args, "channels": 1})
    assert grey[0]["image"].shape == (3, 3, 1)


def test_images_are_cut_to_the_middle_not_squeezed(tmp_path: Path) -> None:
    (tmp_path / "train" / "a").mkdir(parents=True)
    pixels = np.zeros((4, 12), np.uint8)
    pixels[:, 4:8] = 255
    Image.fromarray(pixels).save(tmp_path / "train" / "a" / "1.png")
    source = opened("images", {"path": str(tmp_path), "image_size": 4, "channels": 1})
    np.testing.assert_array_equal(source[0]["image"], np.ones((4, 4, 1), np.float32))


def test_the_part_of_a_class_held_out_is_exact(tmp_path: Path) -> None:
    _, args = images_case(tmp_path)
    labels = [
        [int(s[i]["label"]) for i in range(len(s))] for s in (opened("images", args), opened("images", args, "test"))
    ]
    assert labels == [[0] * 8 + [1] * 8, [0] * 2 + [1] * 2]
    assert len(opened("images", {**args, "test_fraction": 0.0}, "test")) == 0


def test_damaged_or_missing_images_are_refused(tmp_path: Path) -> None:
    write_image(tmp_path / "train" / "a" / "1.png", 1, size=(64, 64))
    whole = (tmp_path / "train" / "a" / "1.png").read_bytes()
    args = {"path": str(tmp_path), "image_size": 4}
    for content in (b"", b"no image", whole[: len(whole) // 2]):
        (tmp_path / "train" / "a" / "2.png").write_bytes(content)
        assert f"InputRefused: {tmp_path}/train/a/2.png is no readable image" in refusal("images", args, read=True)
    assert len(opened("images", args, "test")) == 0
    write_image(tmp_path / "test" / "z" / "1.png", 1)
    assert f"{tmp_path}/test/z: there is no such class" in refusal("images", args, "test")
    (tmp_path / "train" / "empty").mkdir()
    assert f"{tmp_path}/train/empty holds no images" in refusal("images", args)
    assert "has no folder 'train'" in refusal("images", {**args, "path": str(tmp_path / "train")})
    assert "there is no such folder" in refusal("images", {**args, "path": str(tmp_path / "none")})
    assert "channels = 2: Input should be 1 or 3" in refusal("images", {**args, "channels": 2})


def test_array_records_come_in_the_order_of_their_files(tmp_path: Path) -> None:
    name, args = arrayrecord_case(tmp_path)
    source = opened(name, args)
    assert [float(source[i]["x"][0]) for i in range(len(source))] == [0, 1, 2, 3, 4, 10, 11, 12, 13, 14]
    listed = [str(tmp_path / "train-1.arrayrecord"), str(tmp_path / "train-0.arrayrecord")]
    assert float(opened(name, {**args, "path": listed})[0]["x"][0]) == 10
    assert "both data.args.path and" in refusal(name, {**args, "test_path": listed})
    assert len(opened(name, {"path": args["path"]}, "test")) == 0


def test_array_records_can_be_decoded_by_the_user(tmp_path: Path) -> None:
    path = write_records(tmp_path / "a.arrayrecord", [bytes([1, 2]), bytes([3, 4])])
    source = opened("arrayrecord", {"path": path, "decode": f"{__name__}:decode"})
    assert source[1]["x"].tolist() == [3, 4]
    message = refusal("arrayrecord", {"path": path, "decode": f"{__name__}:decoder"})
    assert "data.args.decode" in message
    assert "did you mean 'decode'?" in message


def decode(record: bytes) -> dict[str, np.ndarray]:
    return {"x": np.frombuffer(record, np.uint8)}


def test_damaged_or_missing_array_records_are_refused(tmp_path: Path) -> None:
    path = write_records(tmp_path / "a.arrayrecord", [archive(x=np.zeros(2)), b"junk", archive(x=np.array([{}]))])
    message = refusal("arrayrecord", {"path": path}, read=True)
    assert message.startswith("InputRefused: record 1: no readable .npz archive")
    objects = write_records(tmp_path / "b.arrayrecord", [archive(x=np.array([{}]))])
    assert "record 0: no readable .npz archive" in refusal("arrayrecord", {"path": objects}, read=True)
    for content in (b"", b"x" * 100_000):
        (tmp_path / "junk.arrayrecord").write_bytes(content)
        message = refusal("arrayrecord", {"path": str(tmp_path / "junk.arrayrecord")})
        assert "junk.arrayrecord: no readable ArrayRecord" in message
    assert "there is no such file" in refusal("arrayrecord", {"path": str(tmp_path / "none-*")})
