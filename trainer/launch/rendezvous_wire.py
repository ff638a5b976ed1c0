"""JSON lines over TCP, and how two agents prove to each other that they know the token, which is itself never sent.

Nothing is encrypted: the trust model is a private network.
"""

import hmac
import json
import secrets
import socket
from contextlib import suppress
from typing import Any

Message = dict[str, Any]

MOST_BYTES = 4_000_000
"""The longest line between agents; a view of a host with very many workers is far shorter."""
MOST_BYTES_OF_A_STRANGER = 4096
CHUNK = 65536


def nonce() -> str:
    """A number used once, so that an overheard proof is of no use later."""
    return secrets.token_hex(16)


def proof(token: str, who: str, theirs: str, ours: str) -> str:
    """That ``who`` ("agent" or "leader") knows the token, bound to both sides' nonces."""
    text = f"lockstep {who} {theirs} {ours}"
    return hmac.digest(_bytes(token), _bytes(text), "sha256").hex()


def proves(message: Message, token: str, who: str, theirs: str, ours: str) -> bool:
    """Whether ``message`` carries that proof."""
    given = message.get("proof")
    return isinstance(given, str) and hmac.compare_digest(_bytes(given), _bytes(proof(token, who, theirs, ours)))


def _bytes(text: str) -> bytes:
    return text.encode(errors="backslashreplace")  # JSON can hold halves of characters


class Link:
    """A connection that never blocks. ``closed`` says why it is over, "" while it lives; both are set by any call.

    heard: when bytes last came, on the owner's clock.
    peer:  the other side's address.
    """

    def __init__(self, sock: socket.socket, peer: str, now: float, most_bytes: int = MOST_BYTES) -> None:
        sock.setblocking(False)
        with suppress(OSError):  # one that is reset already is noticed by the first read
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.sock = sock
        self.peer = peer
        self.opened = self.heard = now
        self.most_bytes = most_bytes
        self.closed = ""
        self.nonce = nonce()
        self._incoming = b""
        self._outgoing = b""

    def fileno(self) -> int:
        return self.sock.fileno()

    @property
    def wants_to_write(self) -> bool:
        return bool(self._outgoing)

    def send(self, message: Message) -> None:
        """Queues ``message``, and writes what the kernel takes now."""
        if not self.closed:
            self._outgoing += json.dumps(message, allow_nan=False).encode() + b"\n"
            self.flush()

    def flush(self) -> None:
        try:
            while self._outgoing and not self.closed:
                self._outgoing = self._outgoing[self.sock.send(self._outgoing) :]
        except OSError as error:
            self._lost(error)

    def receive(self, now: float) -> list[Message]:
        """The messages that have come. Anything else than JSON objects in lines of bounded length closes the link."""
        try:
            while not self.closed and len(self._incoming) <= self.most_bytes:
                chunk = self.sock.recv(CHUNK)
                if not chunk:
                    self.close("the other side closed the connection")
                    break
                self.heard = now
                self._incoming += chunk
        except OSError as error:
            self._lost(error)
        *lines, self._incoming = self._incoming.split(b"\n")
        if max(map(len, [*lines, self._incoming])) > self.most_bytes:
            self.close("a line was too long")
            return []
        return self._parse(lines)

    def _parse(self, lines: list[bytes]) -> list[Message]:
        messages = []
        for line in lines:
            try:
                message = json.loads(line)
            except (ValueError, RecursionError):
                message = None
            if not isinstance(message, dict):
                self.close("what came is no line of an agent")
                return []
            messages.append(message)
        return messages

    def lapse(self, now: float, lease_seconds: float) -> None:
        """Closes a link that has been silent for longer than its lease."""
        if not self.closed and now - self.heard > lease_seconds:
            self.close(f"nothing was heard of it for {lease_seconds:g} s")

    def _lost(self, error: OSError) -> None:
        if not isinstance(error, BlockingIOError):
            self.close(error.strerror or "connection lost")

    def close(self, why: str) -> None:
        self.closed = self.closed or why
        self.sock.close()
