"""Ranks that torchrun has started: each runs this command, and rank 0 judges what all answer.

Tasks and answers go through the store that the launcher's environment names. A function runs in a
thread of its own, so that a rank that hangs in it, or is about to be ended because another one has
died, still says so.
"""

import os
import pickle
import signal
import sys
import threading
import time
from collections.abc import Sequence
from typing import Any

from . import contracts
from .contract import parameters_of
from .launch import GRACE_S, SHORT_GRACE_S, WELL, Setting
from .rank import Grid, Usage, answer, load, torch_here, torch_or_refusal

POLL_S = 0.01
ALIVE_S = 3.0  # in which ranks that the launcher ends say that they were alive


def is_joined() -> bool:
    """Whether a launcher of torch has started this process."""
    return {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"} <= os.environ.keys()


class Joined:
    """The ranks of one launcher. On ranks other than 0, start serves, and ends the process."""

    def __init__(self, setting: Setting, timeout: float) -> None:
        self.setting, self.timeout, self.case = setting, timeout, 0
        self.rank, self.ended = int(os.environ["RANK"]), threading.Event()
        self.code, self.is_over = 1, False

    def start(self) -> None:
        if self.setting.backend == "numpy":
            raise Usage("--backend numpy starts its own ranks; under torchrun it must be gloo or nccl")
        torch = torch_or_refusal()
        if self.setting.backend == "nccl":
            torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", self.rank)))
        store, rank, size = next(torch.distributed.rendezvous("env://"))
        torch.distributed.init_process_group(
            self.setting.backend, store=torch.distributed.PrefixStore("torch", store), rank=rank, world_size=size
        )
        self.store = torch.distributed.PrefixStore("gyre", store)
        s = self.setting
        self.here = {grid: torch_here(rank, s.backend, grid, s.kind) for grid in s.grids}
        self.contract, self.function = contracts.named(s.contract), load(s.function)
        self.parameters = parameters_of(self.function)
        signal.signal(signal.SIGTERM, lambda *_: self.ended.set())
        if rank:
            self._serve()

    def _begin(self, piece: Any, needs: Any, grid: Grid) -> list[Any]:
        """Runs the function in a thread; the list holds its outcome once there is one."""
        found: list[Any] = []
        here = self.here[grid]
        here.forward_only = self.setting.forward_only

        def run() -> None:
            if self.setting.backend == "nccl":
                torch_or_refusal().cuda.set_device(here.device)
            found.append(answer(self.contract, self.function, piece, needs, here))

        threading.Thread(target=run, daemon=True).start()
        return found

    def _get(self, key: str) -> Any:
        return pickle.loads(self.store.get(key)) if self.store.check([key]) else None

    def _serve(self) -> None:
        found: list[Any] | None = None
        while True:
            if self.ended.is_set():
                self.store.set(f"{self.case}/alive/{self.rank}", b"")
                os._exit(1)
            if found:
                self.store.set(f"{self.case}/answer/{self.rank}", pickle.dumps(found[0]))
                found = None
            if found is None and (task := self._get(f"{self.case + 1}/task/{self.rank}")):
                if len(task) == 1:
                    self._leave(task[0])
                self.case += 1
                found = self._begin(*task)
            time.sleep(POLL_S)

    def run(self, pieces: Sequence[Any], needs: Any, grid: Grid) -> list[tuple[Any, ...]]:
        """The outcome of a case on every rank; on rank 0. No rank can be started again after one that failed."""
        outcomes = self._outcomes(pieces, needs, grid)
        self.is_over = bool({o[0] for o in outcomes} & {"died", "hangs", "waits", "raised"})
        return outcomes

    def _outcomes(self, pieces: Sequence[Any], needs: Any, grid: Grid) -> list[tuple[Any, ...]]:
        self.case += 1
        for rank, piece in enumerate(pieces):
            if rank:
                self.store.set(f"{self.case}/task/{rank}", pickle.dumps((piece, needs, grid)))
        found: dict[int, tuple[Any, ...]] = {}
        mine = self._begin(pieces[0], needs, grid)
        end = time.monotonic() + self.timeout
        while len(found) < len(pieces) and time.monotonic() < end and not self.ended.is_set():
            for rank in set(range(len(pieces))) - found.keys():
                outcome = (mine[0] if mine else None) if rank == 0 else self._get(f"{self.case}/answer/{rank}")
                if outcome:
                    found[rank] = outcome
                    if outcome[0] not in WELL:
                        end = min(end, time.monotonic() + GRACE_S.get(outcome[0], SHORT_GRACE_S))
            time.sleep(POLL_S)
        if self.ended.is_set():
            return self._who_died(found, len(pieces))
        late = ("waits",) if any(o[0] not in WELL for o in found.values()) else ("hangs", self.timeout)
        return [found.get(rank, late) for rank in range(len(pieces))]

    def _who_died(self, found: dict[int, tuple[Any, ...]], size: int) -> list[tuple[Any, ...]]:
        """The launcher ends all ranks, because one has died: one that neither answered nor is alive."""
        end = time.monotonic() + ALIVE_S
        others = {r for r in range(1, size)}
        alive: set[int] = {0}
        while time.monotonic() < end and others - alive:
            alive |= {r for r in others if self.store.check([f"{self.case}/alive/{r}"])}
            time.sleep(POLL_S)
        dead = others - alive - {r for r, o in found.items() if o[0] in WELL}
        return [("died", None) if r in dead else found.get(r, ("waits",)) for r in range(size)]

    def stop(self) -> None:
        """Tells the others the exit code. A rank that hangs is ended by the launcher."""
        if self.rank == 0 and hasattr(self, "store"):
            for rank in range(1, self.setting.ranks):
                self.store.set(f"{self.case + 1}/task/{rank}", pickle.dumps((self.code,)))

    def _leave(self, code: int) -> None:
        sys.stdout.flush()
        os._exit(code)
