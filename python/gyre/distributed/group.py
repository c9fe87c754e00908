"""A group of ranks that exchange NumPy arrays: what functions get where torch is not asked for.

Every rank reads all that its peers send as it arrives, so no order of sends can lock two ranks.
"""

import queue
import threading
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

REDUCTIONS: dict[str, Callable[..., Any]] = {"sum": np.add, "max": np.maximum, "min": np.minimum}


class PeerGone(ConnectionError):
    """A peer has ended while this rank waited for it."""


class Wires:
    """Connections of one rank with all others; messages are sorted by the group that they belong to."""

    def __init__(self, peers: Mapping[int, Connection]) -> None:
        self.peers = peers
        self.boxes: dict[tuple[str, int], queue.SimpleQueue[Any]] = defaultdict(queue.SimpleQueue)
        self.gone: set[int] = set()
        self.changed = threading.Condition()
        for peer, connection in peers.items():
            threading.Thread(target=self._read, args=(peer, connection), daemon=True).start()

    def _read(self, peer: int, connection: Connection) -> None:
        while True:
            try:
                tag, message = connection.recv()
            except (EOFError, OSError):
                with self.changed:
                    self.gone.add(peer)
                    self.changed.notify_all()
                return
            with self.changed:
                self.boxes[tag, peer].put(message)
                self.changed.notify_all()

    def send(self, tag: str, peer: int, message: Any) -> None:
        try:
            self.peers[peer].send((tag, message))
        except OSError as error:
            raise PeerGone(f"rank {peer} has ended") from error

    def receive(self, tag: str, peer: int) -> Any:
        with self.changed:
            box = self.boxes[tag, peer]
            self.changed.wait_for(lambda: not box.empty() or peer in self.gone)
            if box.empty():
                raise PeerGone(f"rank {peer} has ended")
            return box.get()


class Group:
    """Ranks 0 to size - 1, one a process. Every rank of a group makes the same calls in the same order."""

    def __init__(self, wires: Wires, tag: str, members: Sequence[int], me: int) -> None:
        self._wires, self._tag, self._members = wires, tag, list(members)
        self.rank, self.size = self._members.index(me), len(members)
        self._own: queue.SimpleQueue[Any] = queue.SimpleQueue()

    def send(self, array: Any, to: int) -> None:
        """Returns at once; the peer receives a copy."""
        if to == self.rank:
            self._own.put(np.array(array))
        else:
            self._wires.send(self._tag, self._members[to], np.asarray(array))

    def receive(self, source: int) -> np.ndarray:
        """The next array that this peer sent."""
        return self._own.get() if source == self.rank else self._wires.receive(self._tag, self._members[source])

    def all_to_all(self, arrays: Sequence[Any]) -> list[np.ndarray]:
        """arrays[r] goes to rank r; what came from each rank."""
        if len(arrays) != self.size:
            raise ValueError(f"all_to_all was given {len(arrays)} arrays; the group has {self.size} ranks")
        for peer, array in enumerate(arrays):
            self.send(array, peer)
        return [self.receive(peer) for peer in range(self.size)]

    def all_gather(self, array: Any) -> list[np.ndarray]:
        """The arrays of all ranks, which may have any shapes."""
        return self.all_to_all([array] * self.size)

    def all_reduce(self, array: Any, operation: str = "sum") -> np.ndarray:
        """The sum, max or min over the ranks, in their order: every rank has the same bits."""
        parts = self.all_gather(array)
        total = parts[0]
        for part in parts[1:]:
            total = REDUCTIONS[operation](total, part)
        return total

    def broadcast(self, array: Any, root: int = 0) -> np.ndarray:
        """The root's array; what other ranks pass is not read."""
        if self.rank == root:
            for peer in range(self.size):
                self.send(array, peer)
        return self.receive(root)

    def barrier(self) -> None:
        """Returns when every rank has called it."""
        self.all_gather(np.zeros(0))
