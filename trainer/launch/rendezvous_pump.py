"""The one daemon thread that moves bytes between an agent and the others, so that leases are renewed while it works."""

import select
import threading
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable

from trainer.launch.rendezvous_wire import Link

TURN_SECONDS = 0.1
"""How long the thread sleeps when nothing comes: what is published waits for no longer than that."""

Clock = Callable[[], float]


class Pump(ABC):
    """Calls ``turn`` again and again on a daemon thread, which can hold up no exit, until ``close``.

    What subclasses keep is touched with ``lock`` held only, by either thread.
    """

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.lock = threading.Condition()
        self.closed = False
        self.broken = ""
        self._thread = threading.Thread(target=self._run, name="rendezvous", daemon=True)

    def start(self) -> None:
        self._thread.start()

    @abstractmethod
    def turn(self) -> None:
        """Waits for bytes or a moment, and handles what came."""

    @abstractmethod
    def close(self) -> None:
        """Ends the thread and closes every socket."""

    def wait_until(self, condition: Callable[[], bool], seconds: float) -> bool:
        """Whether ``condition``, called with the lock held, became true within ``seconds``."""
        deadline = self.clock() + seconds
        with self.lock:
            while not condition():
                if self.clock() >= deadline or self.closed or self.broken:
                    return False
                self.lock.wait(TURN_SECONDS)
            return True

    def _run(self) -> None:
        try:
            while not self.closed:
                self.turn()
                with self.lock:
                    self.lock.notify_all()
        except Exception as error:  # a fault of ours: the agent has to hear of it, for it does not run here
            traceback.print_exc()
            with self.lock:
                self.broken = f"{type(error).__name__}: {error}"
                self.close()
                self.lock.notify_all()


def wait_for_bytes(links: list[Link], listener_fd: int = -1, seconds: float = TURN_SECONDS) -> set[int]:
    """The file descriptors on which something can be read or written; empty after ``seconds``."""
    poller = select.poll()
    if listener_fd >= 0:
        poller.register(listener_fd, select.POLLIN)
    for link in links:
        if not link.closed:
            poller.register(link.fileno(), select.POLLIN | (select.POLLOUT if link.wants_to_write else 0))
    return {fd for fd, _ in poller.poll(seconds * 1000)}
