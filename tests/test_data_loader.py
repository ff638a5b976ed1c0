"""The loader: what is in which batch, where it resumes, and who reads it when."""

import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from itertools import islice

import numpy as np
import pytest

from trainer.data import Batch, Example, Loader, Source, evaluation_batches, num_batches_per_epoch
from trainer.data.source import ArraySource
from trainer.errors import ExitCode, InputRefused


def numbered(num_examples: int) -> ArraySource:
    """Examples whose value tells their id."""
    ids = np.arange(num_examples, dtype=np.int32)
    return ArraySource({"x": ids[:, None] + np.array([0.0, 0.5], np.float32), "label": ids})


def make(source: Source, global_batch: int, rows: slice | None = None, seed: int = 0, **options: int) -> Loader:
    options = {"num_threads": 2, "prefetch_batches": 2, **options}
    return Loader(source, seed=seed, global_batch=global_batch, rows=rows or slice(0, global_batch), **options)


def take(loader: Loader, num: int, start_step: int = 0) -> list[Batch]:
    with loader.iterate(start_step) as batches:
        return list(islice(batches, num))


def ids(batches: list[Batch]) -> list[list[int]]:
    return [batch["example_id"].tolist() for batch in batches]


def real(batches: list[Batch]) -> list[int]:
    return [i for batch in batches for i in batch["example_id"].tolist() if i >= 0]


def assert_same(left: list[Batch], right: list[Batch]) -> None:
    assert len(left) == len(right)
    for one, other in zip(left, right, strict=True):
        assert one.keys() == other.keys()
        for name in one:
            np.testing.assert_array_equal(one[name], other[name], strict=True)


def eventually(condition: Callable[[], bool], seconds: float = 60.0) -> bool:
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.01)
    return condition()


# What is in a batch.


@pytest.mark.parametrize(
    ("num_examples", "global_batch"), [(10, 4), (8, 4), (9, 4), (7, 7), (8, 7), (13, 7), (14, 7), (1, 1)]
)
def test_each_epoch_has_every_example_once_and_no_batch_spans_two(num_examples: int, global_batch: int) -> None:
    loader = make(numbered(num_examples), global_batch)
    per_epoch = num_batches_per_epoch(num_examples, global_batch)
    assert per_epoch == loader.batches_per_epoch == int(np.ceil(num_examples / global_batch))
    batches = take(loader, 3 * per_epoch)
    for epoch in range(3):
        own = batches[epoch * per_epoch : (epoch + 1) * per_epoch]
        assert sorted(real(own)) == list(range(num_examples))
        assert [int(batch["weight"].sum()) for batch in own[:-1]] == [global_batch] * (per_epoch - 1)


def test_a_batch_holds_the_examples_that_its_ids_name() -> None:
    for batch in take(make(numbered(10), 4), 3):
        is_real = batch["example_id"] >= 0
        assert batch["x"].shape == (4, 2)
        assert {name: str(array.dtype) for name, array in batch.items()} == {
            "x": "float32",
            "label": "int32",
            "weight": "float32",
            "example_id": "int32",
        }
        np.testing.assert_array_equal(batch["weight"], is_real.astype(np.float32))
        np.testing.assert_array_equal(batch["label"][is_real], batch["example_id"][is_real])
        np.testing.assert_array_equal(batch["x"][is_real, 1], batch["label"][is_real] + 0.5)


def test_padding_stands_at_the_end_and_repeats_a_real_example() -> None:
    last = take(make(numbered(10), 4), 3)[-1]
    assert last["weight"].tolist() == [1, 1, 0, 0]
    assert last["example_id"][2:].tolist() == [-1, -1]
    np.testing.assert_array_equal(last["x"][2:], [[0, 0.5], [0, 0.5]])


def test_epochs_and_seeds_have_different_orders() -> None:
    source = numbered(32)
    batches = take(make(source, 8), 8)
    assert real(batches[:4]) != real(batches[4:])
    assert real(take(make(source, 8, seed=1), 4)) != real(batches[:4])
    assert real(batches[:4]) != sorted(real(batches[:4]))


@pytest.mark.parametrize("num_processes", [1, 2, 4])
def test_every_number_of_processes_reads_the_same_global_batches(num_processes: int) -> None:
    source, size = numbered(10), 4 // num_processes
    whole = take(make(source, 4), 6)
    parts = [take(make(source, 4, slice(p * size, (p + 1) * size)), 6) for p in range(num_processes)]
    for step, batch in enumerate(whole):
        for name in batch:
            np.testing.assert_array_equal(np.concatenate([part[step][name] for part in parts]), batch[name])
    assert all(sorted(i for part in parts for i in real(part[e : e + 3])) == list(range(10)) for e in (0, 3))


def test_unequal_rows_also_make_up_the_global_batch() -> None:
    source = numbered(10)
    parts = [ids(take(make(source, 4, rows), 3)) for rows in (slice(0, 3), slice(3, 4))]
    assert [first + second for first, second in zip(*parts, strict=True)] == ids(take(make(source, 4), 3))


@pytest.mark.parametrize("rows", [slice(0, 0), slice(2, 2), slice(0, 4, 2), slice(4, 8)])
def test_rows_outside_the_batch_are_a_mistake(rows: slice) -> None:
    with pytest.raises(ValueError, match="no contiguous, non-empty part"):
        make(numbered(10), 4, rows)


def test_epoch_of_a_step() -> None:
    loader = make(numbered(10), 4)
    assert [loader.epoch(step) for step in range(8)] == [0, 0, 0, 0, 1, 1, 1, 2]


def test_fewer_examples_than_a_batch_are_refused() -> None:
    with pytest.raises(InputRefused, match=r"3 training examples .* data\.global_batch = 8") as refused:
        make(numbered(3), 8)
    assert refused.value.exit_code == ExitCode.INPUT_REFUSED
    make(numbered(8), 8)
    with pytest.raises(InputRefused, match="7 training"):
        make(numbered(7), 8)


# Resuming.


def test_resume_at_any_step_continues_the_unbroken_stream() -> None:
    loader = make(numbered(10), 4)
    unbroken = take(loader, 9)
    for step in range(8):
        assert_same(take(loader, 9 - step, start_step=step), unbroken[step:])


class Recorder:
    """Numbered examples that remember who read what; a gate, if any, must open first."""

    def __init__(self, num_examples: int, gate: threading.Event | None = None) -> None:
        self.source, self.gate = numbered(num_examples), gate
        self.read: list[int] = []
        self.threads: set[threading.Thread] = set()

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, index: int, /) -> Example:
        if self.gate is not None:
            self.gate.wait()
        self.read.append(index)
        self.threads.add(threading.current_thread())
        return self.source[index]


def test_resume_reads_nothing_of_what_it_skips() -> None:
    source = Recorder(1000)
    loader = make(source, 10, num_threads=1, prefetch_batches=1)
    source.read.clear()
    step = 10**9 + 99  # the last batch of an epoch
    (batch,) = take(loader, 1, start_step=step)
    assert source.read[:10] == batch["example_id"].tolist() == loader.example_ids(step).tolist()
    assert len(source.read) <= 30


def test_state_is_json_and_is_accepted_by_the_same_loader() -> None:
    loader = make(numbered(10), 4)
    state = json.loads(json.dumps(loader.state(7)))
    assert state["next_batch"] == 7
    loader.check_state(state)
    make(numbered(10), 4, slice(2, 4)).check_state(state)  # another number of processes


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (make(numbered(11), 4), r"num_examples = 10, but this run has 11: .*data"),
        (make(numbered(10), 5), r"global_batch = 4, but this run has 5: data\.global_batch"),
        (make(numbered(10), 4, seed=1), r"seed = 0, but this run has 1: run\.seed"),
    ],
)
def test_state_of_another_loader_is_refused(other: Loader, message: str) -> None:
    with pytest.raises(InputRefused, match=message):
        other.check_state(make(numbered(10), 4).state(7))


@pytest.mark.parametrize("change", [{"order": "0" * 16}, {"next_batch": -1}, {"next_batch": None}, {"seed": None}])
def test_damaged_state_is_refused(change: dict[str, object]) -> None:
    loader = make(numbered(10), 4)
    with pytest.raises(InputRefused, match=f"data state has {next(iter(change))} = "):
        loader.check_state({**loader.state(7), **change})
    with pytest.raises(InputRefused, match=next(iter(change))):
        loader.check_state({key: value for key, value in loader.state(7).items() if key not in change})


# Evaluation.


@pytest.mark.parametrize("num_examples", [1, 7, 8, 9, 21, 24])
@pytest.mark.parametrize("num_processes", [1, 2, 4])
def test_evaluation_counts_each_example_once_in_its_order(num_examples: int, num_processes: int) -> None:
    source, size = numbered(num_examples), 8 // num_processes
    parts = [list(evaluation_batches(source, 8, slice(p * size, (p + 1) * size))) for p in range(num_processes)]
    whole = [np.concatenate([batch["example_id"] for batch in step]) for step in zip(*parts, strict=True)]
    assert [len(step) for step in whole] == [8] * num_batches_per_epoch(num_examples, 8)
    assert [i for step in whole for i in step.tolist() if i >= 0] == list(range(num_examples))
    assert sum(float(batch["weight"].sum()) for part in parts for batch in part) == num_examples
    assert all(
        (batch["label"][batch["weight"] > 0] == batch["example_id"][batch["weight"] > 0]).all() for batch in parts[0]
    )


def test_evaluation_on_nothing_is_refused() -> None:
    with pytest.raises(InputRefused, match="the test split has no examples"):
        evaluation_batches(ArraySource({}), 8, slice(0, 8))


def test_an_exhausted_evaluation_stays_exhausted() -> None:
    batches = evaluation_batches(numbered(3), 8, slice(0, 8))
    assert len(list(batches)) == 1
    assert list(batches) == []


# Reading ahead, in threads that end.


def test_reading_runs_ahead_of_the_consumer_in_other_threads() -> None:
    source = Recorder(100)
    loader = make(source, 4, prefetch_batches=3)
    source.read.clear()
    source.threads.clear()
    with loader.iterate(0) as batches:
        assert eventually(lambda: len(source.read) >= 12)  # three batches, and nobody has asked for one
        assert threading.current_thread() not in source.threads
        next(batches)
        assert eventually(lambda: len(source.read) >= 16)
        time.sleep(0.05)
        assert len(source.read) == 16  # and no further


def test_closing_ends_the_threads() -> None:
    source = Recorder(100)
    batches = make(source, 4).iterate(0)
    next(batches)
    threads = source.threads - {threading.current_thread()}
    assert any(thread.is_alive() for thread in threads)
    batches.close()
    batches.close()
    assert eventually(lambda: not any(thread.is_alive() for thread in source.threads - {threading.current_thread()}))
    with pytest.raises(ValueError, match="closed"):
        next(batches)


def test_closing_does_not_wait_for_a_read_that_is_stuck() -> None:
    gate = threading.Event()
    gate.set()
    source = Recorder(100, gate)
    loader = make(source, 4)
    gate.clear()
    try:
        batches = loader.iterate(0)
        batches.close()
    finally:
        gate.set()
    assert eventually(lambda: not any(t.is_alive() for t in source.threads - {threading.current_thread()}))


def test_evaluation_ends_its_threads_at_its_end() -> None:
    source = Recorder(20)
    batches = evaluation_batches(source, 8, slice(0, 8))
    list(batches)
    assert eventually(lambda: not any(t.is_alive() for t in source.threads - {threading.current_thread()}))


def test_a_program_that_ends_without_closing_ends_quietly() -> None:
    program = """
import numpy as np
from trainer.data import ArraySource, Loader
loader = Loader(ArraySource({"x": np.zeros((10, 2), np.float32)}), seed=0, global_batch=4, rows=slice(0, 4),
                num_threads=2, prefetch_batches=2)
batches = loader.iterate(0)
print(next(batches)["x"].shape)
"""
    command = [sys.executable, "-W", "error", "-c", program]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "(4, 2)\n", "")


# What a source may give.


class Given:
    """A source that gives what it is told to."""

    def __init__(self, *examples: object) -> None:
        self.examples = examples

    def __len__(self) -> int:
        return len(self.examples)

    def __getitem__(self, index: int, /) -> Example:
        example = self.examples[index]
        if isinstance(example, Exception):
            raise example
        return example  # pyright: ignore[reportReturnType]  (the point is that it may be wrong)


def test_64_bit_values_and_plain_numbers_become_32_bit() -> None:
    (batch,) = take(make(Given(*[{"x": 0.5, "y": np.int64(i), "z": np.uint64(2**32 - 1)} for i in range(4)]), 4), 1)
    assert [str(batch[name].dtype) for name in "xyz"] == ["float32", "int32", "uint32"]
    assert sorted(batch["y"].tolist()) == [0, 1, 2, 3]
    assert batch["z"].tolist() == [2**32 - 1] * 4


@pytest.mark.parametrize(
    ("examples", "message"),
    [
        ([{"x": 1, "weight": 1.0}], "'weight', which the loader adds"),
        ([{"example_id": 1}], "'example_id', which the loader adds"),
        ([{"x": "text"}], "'x' of Given has dtype <U4"),
        ([{"x": None}], "'x' of Given has dtype object"),
        ([[1, 2]], "gave list for example 0"),
        ([OSError("disk gone")], "example 0 of Given cannot be read: disk gone"),
        ([{"x": np.zeros(2)}, {"x": np.zeros(3)}], r"'x' of example 1 is float64 of shape \(3,\)"),
        ([{"x": np.zeros(2)}, {"x": np.zeros(2, np.float32)}], r"'x' of example 1 is float32"),
        ([{"x": 1}, {"y": 1}], r"example 1 has arrays \['y'\], but example 0 has \['x'\]"),
        ([{"x": 1}, OSError("disk gone")], "example 1 of Given cannot be read: disk gone"),
        ([{"x": 1}, {"x": 2**31}], "'x' has a value outside -2147483648 to 2147483647"),
    ],
)
def test_examples_that_make_no_batch_are_refused_in_one_line(examples: list[object], message: str) -> None:
    with pytest.raises(InputRefused, match=message) as refused:
        take(make(Given(*examples), len(examples)), 1)
    assert "\n" not in str(refused.value)
