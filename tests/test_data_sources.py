"""What all sources have in common, those that need no files, and a source of one's own."""

import ast
import typing
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from data_cases import CASES, Args, Case, opened, refusal, told

import trainer.data
from trainer.config import SourceName
from trainer.data import Loader, Split, evaluation_batches
from trainer.data.sources import SOURCES
from trainer.errors import InputRefused, SettingsRefused


@pytest.mark.parametrize("case", CASES)
def test_every_source_has_two_fixed_disjoint_splits_of_equally_shaped_examples(case: Case, tmp_path: Path) -> None:
    name, args = case(tmp_path)
    train, test = opened(name, args), opened(name, args, "test")
    assert told(train) == told(opened(name, args))
    assert told(test) == told(opened(name, args, "test"))
    assert len(set(told(train))) > 1
    assert not set(told(train)) & set(told(test))
    kinds = {
        tuple((n, np.shape(v), np.asarray(v).dtype) for n, v in s[i].items())
        for s in (train, test)
        for i in range(len(s))
    }
    assert len(kinds) == 1


@pytest.mark.parametrize("case", CASES)
def test_every_source_can_be_loaded_and_evaluated(case: Case, tmp_path: Path) -> None:
    name, args = case(tmp_path)
    train, test = opened(name, args), opened(name, args, "test")
    loader = Loader(train, seed=0, global_batch=8, rows=slice(0, 8), num_threads=2, prefetch_batches=2)
    with loader.iterate(0) as batches:
        batch = next(batches)
    assert all(len(array) == 8 and array.dtype.itemsize <= 4 for array in batch.values())
    assert sum(int(batch["weight"].sum()) for batch in evaluation_batches(test, 8, slice(0, 8))) == len(test)


def test_the_table_has_the_names_of_the_settings() -> None:
    assert set(SOURCES) == set(typing.get_args(SourceName))


def test_nothing_reads_pickles() -> None:
    for file in Path(trainer.data.__file__).parent.glob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.keyword) and node.arg == "allow_pickle":
                assert ast.unparse(node.value) == "False"


# One by one.


def test_digits() -> None:
    train, test = opened("digits", {}), opened("digits", {}, "test")
    assert (len(train), len(test)) == (1437, 360)
    for source in (train, test):
        images = np.stack([source[i]["image"] for i in range(len(source))])
        labels = np.array([source[i]["label"] for i in range(len(source))])
        assert (images.shape[1:], images.dtype, labels.dtype) == ((8, 8, 1), np.float32, np.int32)
        assert (images.min(), images.max()) == (0, 1)
        shares = np.bincount(labels, minlength=10) / len(labels)
        assert np.abs(shares - 0.1).max() < 0.005


def test_text_is_python_source_and_its_windows_join_up() -> None:
    train = opened("text", {"seq_len": 50, "max_bytes": 1000})
    assert len(train) == (1000 - 1) // 50
    windows = [train[i]["tokens"] for i in range(len(train))]
    assert all(window.shape == (51,) and window.dtype == np.int32 for window in windows)
    assert all(one[-1] == other[0] for one, other in pairwise(windows))
    joined = bytes(np.concatenate([window[:-1] for window in windows]).astype(np.uint8))
    assert joined.startswith(b'"""')
    assert len(opened("text", {"seq_len": 64})) > 10 * len(opened("text", {"seq_len": 64}, "test")) * 0.5 > 1000


def test_text_shorter_than_a_window_is_refused() -> None:
    assert len(opened("text", {"seq_len": 99, "max_bytes": 100})) == 1
    assert refusal("text", {"seq_len": 100, "max_bytes": 100}).startswith(
        "InputRefused: the train split of text has 100"
    )


def test_synthetic_labels_follow_from_the_image() -> None:
    args = {"num_examples": 200, "image_size": 4, "channels": 3, "num_classes": 7}
    source = opened("synthetic", args)
    seen = set()
    for i in range(len(source)):
        image, label = source[i]["image"].ravel(), int(source[i]["label"])
        assert 0 <= image.min() <= image.max() <= 1
        bright = np.flatnonzero(image > 0.5)
        assert set(bright) == set(range(label * 48 // 7, (label + 1) * 48 // 7))
        seen.add(label)
    assert seen == set(range(7))
    assert "too small to show 99 classes" in refusal("synthetic", {**args, "num_classes": 99})


def test_synthetic_tokens_follow_from_the_two_before() -> None:
    source = opened("synthetic", {"kind": "tokens", "seq_len": 20, "vocab_size": 11, "num_examples": 50})
    for i in range(len(source)):
        tokens = source[i]["tokens"]
        assert tokens.shape == (21,)
        assert ((tokens >= 0) & (tokens < 11)).all()
        np.testing.assert_array_equal((2 * tokens[1:-1] - tokens[:-2]) % 11, tokens[2:])


def test_synthetic_examples_are_the_same_for_ever() -> None:
    source = opened("synthetic", {"kind": "tokens", "seq_len": 3, "vocab_size": 100})
    assert source[5]["tokens"].tolist() == [55, 41, 27, 13]


# Your own source, and wrong settings.


class Squares:
    """A source of one's own."""

    def __init__(self, *, split: Split, num: int, offset: float = 0.0) -> None:
        self.values = np.arange(num, dtype=np.float32) ** 2 + offset + (1000 if split == "test" else 0)

    def __len__(self) -> int:
        return len(self.values)

    def __getitem__(self, index: int, /) -> dict[str, np.ndarray]:
        return {"x": self.values[index]}


def no_split(num: int) -> list[int]:
    return [num]


def no_source(split: str) -> int:
    return len(split)


number = 3


def test_a_source_of_ones_own() -> None:
    args = {"num": 4, "offset": 1}
    assert [float(opened(f"{__name__}:Squares", args)[i]["x"]) for i in range(4)] == [1, 2, 5, 10]
    assert float(opened(f"{__name__}:Squares", args, "test")[0]["x"]) == 1001


@pytest.mark.parametrize(
    ("source", "args", "message"),
    [
        ("text", {}, "data.args: text needs seq_len"),
        ("text", {"seqlen": 4}, "data.args.seqlen: text accepts no such keyword; did you mean 'seq_len'?"),
        ("text", {"seq_len": 4, "split": "test"}, "data.args.split: text accepts no such keyword"),
        ("text", {"seq_len": "4"}, "data.args.seq_len = '4': Input should be a valid integer"),
        ("text", {"seq_len": 0}, "data.args.seq_len = 0: Input should be greater than 0"),
        ("text", {"seq_len": True}, "data.args.seq_len = True: Input should be a valid integer"),
        ("digits", {"path": "x"}, "data.args.path: digits accepts no such keyword; it accepts none"),
        ("synthetic", {"kind": "images"}, "data.args.kind = 'images': Input should be 'image' or 'tokens'"),
        ("npz", {"path": 3}, "data.args.path = 3: Input should be a valid string"),
        (f"{__name__}:Squares", {"num": 4, "ofset": 1}, "data.args.ofset: Squares accepts no such keyword"),
        (f"{__name__}:no_split", {"num": 4}, "no_split must accept the keyword 'split'"),
        (f"{__name__}:no_source", {}, "gave int, which lacks __len__ or __getitem__"),
        (f"{__name__}:number", {}, "is no class or function, but int"),
        (f"{__name__}:Square", {}, "has no 'Square'; did you mean 'Squares'?"),
    ],
)
def test_wrong_settings_are_refused(source: str, args: Args, message: str) -> None:
    line = refusal(source, args)
    assert line.startswith(SettingsRefused.__name__)
    assert message in line


@pytest.mark.parametrize("source", ["npz", "tokens", "images", "arrayrecord"])
def test_missing_data_is_refused(source: str, tmp_path: Path) -> None:
    more = {"tokens": {"seq_len": 4}, "images": {"image_size": 4}}.get(source, {})
    line = refusal(source, {"path": str(tmp_path / "none"), **more})
    assert line.startswith(f"{InputRefused.__name__}: data.args.path = '{tmp_path}/none': there is no such")
