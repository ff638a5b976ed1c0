"""The marks that a worker leaves for its agent, and the command that it finds there, in shared memory.

The memory is a block of 64-bit words, each written by one side only and whole at once. The agent can read it whatever
the worker does: stuck in C, holding the interpreter lock, stopped, or dead. Times are of the host's monotonic clock.
"""

import mmap
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import IntEnum
from typing import Any, NamedTuple, get_args

from trainer.config import PhaseName

PHASES: tuple[PhaseName, ...] = get_args(PhaseName)
RUN, HOLD = 0, -1
"""Commands; a positive one is the step after which to stop."""
HOLD_POLL_SECONDS = 0.002


class Word(IntEnum):
    """Where each word stands in the block."""

    PHASE = 0
    TICKS = 1
    MOVED = 2
    FIRST = 3
    DISPATCHED = 4
    AWAITED = 5
    COMPLETED = 6
    HELD = 7
    LISTENS = 8
    UNLIMITED = 9
    COMMAND = 10
    SAVED = 11


BLOCK_BYTES = 8 * len(Word)


class Marks(NamedTuple):
    """What a worker is busy with, read at one moment.

    phase:      what it is in.
    ticks:      how far it is within the phase; 0: it has not begun what it entered.
    moved:      when it left its last mark, in seconds on the host's monotonic clock.
    first:      the step it started from: 0, or that of the checkpoint.
    dispatched: the last step that it has entered.
    awaited:    the step whose end it waits for; 0 if it waits for none.
    completed:  the last step that it knows the end of.
    held:       whether it stands between two steps until it is told where to stop.
    listens:    whether it prints its stacks when asked to.
    unlimited:  whether it does something that no limit is meant for.
    saved:      the newest step whose checkpoint it knows to be complete; 0: of none.
    """

    phase: PhaseName = "init"
    ticks: int = 0
    moved: float = 0.0
    first: int = 0
    dispatched: int = 0
    awaited: int = 0
    completed: int = 0
    held: bool = False
    listens: bool = False
    unlimited: bool = False
    saved: int = 0


class Block:
    """The shared memory of one worker, as its agent holds it.

    >>> with Block() as block:
    ...     worker = Progress(os.dup(block.fd))
    ...     with worker.phase("eval"):
    ...         worker.tick()
    ...         block.marks().phase, block.marks().ticks
    ('eval', 2)
    """

    def __init__(self) -> None:
        self.fd = _memory()
        self._map = mmap.mmap(self.fd, BLOCK_BYTES)
        self._words: Any = memoryview(self._map).cast("q")
        self._words[Word.MOVED] = time.monotonic_ns()

    def marks(self) -> Marks:
        """What the worker has marked."""
        words = self._words
        return Marks(
            phase=PHASES[words[Word.PHASE]],
            ticks=words[Word.TICKS],
            moved=words[Word.MOVED] / 1e9,
            first=words[Word.FIRST],
            dispatched=words[Word.DISPATCHED],
            awaited=words[Word.AWAITED],
            completed=words[Word.COMPLETED],
            held=bool(words[Word.HELD]),
            listens=bool(words[Word.LISTENS]),
            unlimited=bool(words[Word.UNLIMITED]),
            saved=words[Word.SAVED],
        )

    def command(self, value: int) -> None:
        """Tells the worker what to do from the next boundary between two steps on."""
        self._words[Word.COMMAND] = value

    def close(self) -> None:
        """Gives the memory back; a worker that lives still has its own hold on it. May be called twice."""
        if self.fd >= 0:
            self._words.release()
            self._map.close()
            os.close(self.fd)
            self.fd = -1

    def __enter__(self) -> "Block":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


class Progress:
    """The worker's side. A mark takes a microsecond or so.

    Entering a phase calls ``on_enter`` (phase, step) before the first tick: that is where staged failures strike.
    """

    def __init__(self, fd: int | None = None) -> None:
        """Marks in the memory behind ``fd``, which it takes over; in memory of its own if nobody is to read it."""
        memory = _memory() if fd is None else fd
        self._words: Any = memoryview(mmap.mmap(memory, BLOCK_BYTES)).cast("q")
        os.close(memory)
        self.on_enter: Callable[[PhaseName, int], None] = lambda phase, step: None

    def enter(self, phase: PhaseName) -> None:
        """Marks that ``phase`` begins, for good."""
        self._begin(phase, self._words[Word.DISPATCHED] + (phase == "data"))

    @contextmanager
    def phase(self, phase: PhaseName) -> Iterator[None]:
        """Marks that ``phase`` lasts as long as the block; afterwards it is the phase before again.

        An exception leaves the phase as it is, so that it can be told what failed.
        """
        before, ticks = self._words[Word.PHASE], self._words[Word.TICKS]
        self.enter(phase)
        yield
        self._mark(Word.PHASE, before)
        self._mark(Word.TICKS, ticks)

    def tick(self) -> None:
        """Marks a bit of progress within the phase."""
        self._mark(Word.TICKS, self._words[Word.TICKS] + 1)

    def listens(self) -> None:
        """Marks that stacks are printed when asked for."""
        self._mark(Word.LISTENS, 1)

    def unlimited(self) -> None:
        """Marks that from now on it does something that no limit is meant for, and leaves no marks of it."""
        self._mark(Word.UNLIMITED, 1)

    def saved(self, step: int) -> None:
        """Marks that the checkpoint of ``step`` is complete; 0: that there is none. From any thread.

        It is written beside training, and so no sign that training gets on: the time of the last mark stays.
        """
        self._words[Word.SAVED] = step

    def starts_at(self, step: int) -> None:
        """Marks the step that training goes on from."""
        self._mark(Word.FIRST, step)
        self._mark(Word.COMPLETED, step)
        self._mark(Word.DISPATCHED, step)

    def dispatching(self, program: Callable[..., Any]) -> Callable[..., Any]:
        """``program``, a step, such that each call first marks that the next step is entered."""

        def step(*args: Any) -> Any:
            number = self._words[Word.DISPATCHED] + 1
            self._begin("step", number)
            self._mark(Word.DISPATCHED, number)
            self._mark(Word.AWAITED, number)
            result = program(*args)
            self._mark(Word.AWAITED, 0)
            return result

        return step

    def reading(self, batches: Iterator[Any]) -> Iterator[Any]:
        """``batches``, each read in the phase "data"."""
        while True:
            with self.phase("data"):
                batch = next(batches, None)
            if batch is None:
                return
            yield batch

    @contextmanager
    def awaiting(self, step: int) -> Iterator[None]:
        """Marks that the host waits for the end of ``step``, and then that the step is completed."""
        self._mark(Word.AWAITED, step)
        yield
        self._mark(Word.COMPLETED, step)
        self._mark(Word.AWAITED, 0)

    def must_stop(self, step: int) -> bool:
        """Whether to stop now, after ``step``. Where the agent has all ranks hold, waits for its word."""
        if self._words[Word.COMMAND] == RUN:
            return False
        self._mark(Word.HELD, 1)
        while self._words[Word.COMMAND] == HOLD:
            time.sleep(HOLD_POLL_SECONDS)
        self._mark(Word.HELD, 0)
        return 0 < self._words[Word.COMMAND] <= step

    def _begin(self, phase: PhaseName, step: int) -> None:
        self._mark(Word.TICKS, 0)
        self._mark(Word.PHASE, PHASES.index(phase))
        self.on_enter(phase, step)
        self._mark(Word.TICKS, 1)

    def _mark(self, word: Word, value: int) -> None:
        # The time goes first: were it last, a new phase would for an instant seem to be as old as the one before.
        self._words[Word.MOVED] = time.monotonic_ns()
        self._words[word] = value


_current: list[Progress] = []


def current() -> Progress:
    """This process's marks."""
    if not _current:
        _current.append(Progress())
    return _current[0]


def attach(fd: int) -> Progress:
    """Makes the memory behind ``fd``, inherited from the agent, hold this process's marks from now on."""
    _current[:] = [Progress(fd)]
    return _current[0]


def _memory() -> int:
    """A file descriptor of a block of zeros that has no name."""
    if hasattr(os, "memfd_create"):
        fd = os.memfd_create("lockstep-progress")
    else:
        fd, path = tempfile.mkstemp()
        os.unlink(path)
    os.ftruncate(fd, BLOCK_BYTES)
    return fd
