"""Starts the ranks and collects what they answer, or says which of them hangs or has ended.

Team starts a process a rank, each a copy of a server that has imported what it needs. A rank that
raises, dies or hangs ends its team; the next case has a new one.
"""

import contextlib
import multiprocessing
import os
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from types import ModuleType
from typing import Any

from . import contracts
from .contract import parameters_of
from .group import Group, Wires
from .rank import Grid, Here, Unable, Usage, answer, load, torch_here, torch_or_refusal

GRACE_S = {"left out": 5.0, "refused": 5.0}  # for the others, once one rank has ended without an answer
SHORT_GRACE_S = 1.0  # after an error: the others may wait for that rank
WELL = ("ready", "done")
START_S = 300.0  # imports of torch on a busy machine


@dataclass(frozen=True)
class Setting:
    """Options that all ranks of a run share. All grids are of as many ranks."""

    contract: str
    function: str
    backend: str
    grids: tuple[Grid, ...]
    kind: str
    forward_only: bool

    @property
    def ranks(self) -> int:
        return self.grids[0].ranks


def numpy_here(rank: int, setting: Setting, wires: Wires, case: int, grid: Grid) -> Here:
    """Groups of one case: a message that is left over from another case is in no one's way."""
    groups = {
        name: Group(wires, f"{case} {name} {members[0]}", members, rank) for name, members in grid.groups(rank).items()
    }
    return Here(rank, grid, setting.kind, groups)


def _end_with_command(pipe: Connection) -> None:
    """Ends this rank, which is in a group of its own, and what its function has started once the command is gone."""
    gone = select.poll()
    gone.register(pipe.fileno(), 0)  # that the other end is closed is reported in any case
    gone.poll()
    os.killpg(0, signal.SIGKILL)


def _work(rank: int, setting: Setting, pipe: Connection, peers: dict[int, Connection], port: int) -> None:
    """One rank: loads the function, then answers case after case. What it prints is no part of the report."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the command ends its ranks
    os.setpgid(0, 0)  # and the processes that a function starts, which are of the rank's group
    threading.Thread(target=_end_with_command, args=(pipe,), daemon=True).start()
    os.dup2(2, 1)
    try:
        contract = contracts.named(setting.contract)
        here: dict[Grid, Here] = {}
        if setting.backend == "numpy":
            wires = Wires(peers)
        else:
            torch = torch_or_refusal()
            if setting.backend == "nccl":
                torch.cuda.set_device(rank)
            torch.set_num_threads(1)
            torch.distributed.init_process_group(
                setting.backend, init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=setting.ranks
            )
            here = {grid: torch_here(rank, setting.backend, grid, setting.kind) for grid in setting.grids}
        function = load(setting.function)
        pipe.send(("ready", parameters_of(function)))
    except (Usage, Unable) as error:
        pipe.send(("usage" if isinstance(error, Usage) else "unable", str(error)))
        return
    while True:
        try:
            case, piece, needs, grid = pipe.recv()
        except (EOFError, OSError):
            return
        place = numpy_here(rank, setting, wires, case, grid) if setting.backend == "numpy" else here[grid]
        place.forward_only = setting.forward_only
        pipe.send(answer(contract, function, piece, needs, place))


def _free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


@contextlib.contextmanager
def _without_main(function: str) -> Iterator[None]:
    """Processes that start import the command's main module, which no rank needs but one whose function is there."""
    main = sys.modules["__main__"]
    if not function.startswith("__main__:"):
        sys.modules["__main__"] = ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main


class Team:
    """Processes of all ranks of a setting."""

    is_over = False  # after a failure, others are started
    parameters: set[str] | None = None  # of the function; None: any

    def __init__(self, setting: Setting, timeout: float) -> None:
        self.setting, self.timeout, self.case, self.code = setting, timeout, 0, 1
        self.processes: list[Any] = []
        self.pipes: list[Connection] = []

    def start(self) -> None:
        """Usage, Unable: a rank could not begin."""
        server, ranks, port = multiprocessing.get_context("forkserver"), self.setting.ranks, _free_port()
        server.set_forkserver_preload(
            ["gyre.distributed.launch", *(f"gyre.distributed.{name}" for name in contracts.NAMES),
             *(["torch"] if self.setting.backend != "numpy" else [])]
        )
        ends: list[dict[int, Connection]] = [{} for _ in range(ranks)]
        for a in range(ranks):
            for b in range(a):
                ends[a][b], ends[b][a] = server.Pipe()
        for rank in range(ranks):
            mine, theirs = server.Pipe()
            process = server.Process(target=_work, args=(rank, self.setting, theirs, ends[rank], port))
            with _without_main(self.setting.function):
                process.start()
            theirs.close()
            self.processes.append(process)
            self.pipes.append(mine)
        for peers in ends:
            for connection in peers.values():
                connection.close()
        for rank, outcome in enumerate(self._collect(START_S)):
            if outcome[0] == "usage":
                raise Usage(outcome[1])
            if outcome[0] == "unable":
                raise Unable(f"rank {rank} could not begin: {outcome[1]}")
            if outcome[0] in ("died", "hangs"):
                why = ending(outcome[1]) if outcome[0] == "died" else f"no answer within {outcome[1]:g} s"
                raise Usage(f"rank {rank} could not load the function: {why}")
            self.parameters = outcome[1] if outcome[0] == "ready" else self.parameters

    def stop(self) -> None:
        for process in self.processes:
            with contextlib.suppress(ProcessLookupError, PermissionError):  # it has not begun, or all have ended
                os.killpg(process.pid, signal.SIGKILL)
            process.kill()
        for process in self.processes:
            process.join()
        for pipe in self.pipes:
            pipe.close()
        self.processes, self.pipes = [], []

    def run(self, pieces: Sequence[Any], needs: Any, grid: Grid) -> list[tuple[Any, ...]]:
        """The outcome of a case on every rank."""
        if not self.processes:
            self.start()
        self.case += 1
        for pipe, piece in zip(self.pipes, pieces):
            pipe.send((self.case, piece, needs, grid))
        outcomes = self._collect(self.timeout)
        found = {o[0] for o in outcomes}
        if found & {"died", "hangs", "waits"} or ("raised" in found and self.setting.backend != "numpy"):
            self.stop()  # messages may be left over
        return outcomes

    def _collect(self, seconds: float) -> list[tuple[Any, ...]]:
        """An outcome of each rank; after the first that is not well, the others have little time left."""
        found: dict[int, tuple[Any, ...]] = {}
        end = time.monotonic() + seconds
        while len(found) < len(self.pipes) and (left := end - time.monotonic()) > 0:
            waiting: dict[Any, int] = {}
            for rank in range(len(self.pipes)):
                if rank not in found:
                    waiting |= {self.pipes[rank]: rank, self.processes[rank].sentinel: rank}
            for ready in wait(list(waiting), left):
                rank = waiting[ready]
                if rank not in found:
                    found[rank] = self._outcome(rank)
                    if found[rank][0] not in WELL:
                        end = min(end, time.monotonic() + GRACE_S.get(found[rank][0], SHORT_GRACE_S))
        failed = any(o[0] not in WELL for o in found.values())
        late = ("waits",) if failed else ("hangs", seconds)
        return [found.get(rank, late) for rank in range(len(self.pipes))]

    def _outcome(self, rank: int) -> tuple[Any, ...]:
        if self.pipes[rank].poll():
            try:
                return tuple(self.pipes[rank].recv())
            except (EOFError, OSError):
                pass
        self.processes[rank].join()
        return "died", self.processes[rank].exitcode


def ending(code: int | None) -> str:
    """How a process ended, in words."""
    if code is None:
        return "its launcher ended all"
    if code >= 0:
        return f"exit code {code}"
    try:
        return f"signal {signal.Signals(-code).name}"
    except ValueError:
        return f"signal {-code}"
