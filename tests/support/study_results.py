"""Files of results as the programs write them, made up, for the tests of gyre-study."""

import json
import math
import random
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

BUILD = {"version": "0.1.0", "git": "0123abcd", "git_state": "clean", "type": "Release",
         "compiler": "GNU 12.2.0"}
REASON = "CV 31.2 %, at most 20"


def line(kind: str, **fields: Any) -> str:
    return json.dumps({"schema": "gyre-result/1", "kind": kind, **fields}) + "\n"


def run_line(run: str, ranks: int = 2, build: dict[str, str] = BUILD, **more: Any) -> str:
    suite = {"name": "gyre", "program": "gyre-attention",
             **{name: build[name] for name in ("version", "git", "git_state")}}
    places = [{"rank": rank, "host": f"n{rank % 2 + 1}", "device": "cpu", "cpus": str(rank)}
              for rank in range(ranks)]
    fields = {"id": run, "suite": suite,
              "build": {"type": build["type"], "compiler": build["compiler"]},
              "run": {"argv": ["gyre-attention"], "start": "2026-01-31T12:00:00Z",
                      "launcher": "srun", "job": "slurm 7"}, "ranks": places, "libraries": {},
              "environment": {}, "inputs": [],
              "configuration": {"documents": 1, "tokens": 512, "source": "1 x 512 tokens",
                                "heads": 8, "iters": "auto"}}
    return line("run", **{**fields, **more})


def row_line(run: str, key: dict[str, Any], times: list[float], result: str = "VALID",
             ranks: int = 2, **more: Any) -> str:
    """`times`: ms, of the slowest rank."""
    ordered = sorted(times)
    median = ordered[len(ordered) // 2] if times else None
    low, high = (ordered[1], ordered[-2]) if len(times) > 5 else (None, None)
    flops = 2.0 * key.get("tokens", 512) ** 2
    fields = {"run": run, "time": "2026-01-31T12:00:01Z", "key": key, "samples_ms": [times] * ranks,
              "statistics_ms": {"count": len(times), "median": median, "median_low": low,
                                "median_high": high, "min": min(times, default=None),
                                "p95": max(times, default=None), "mean": median, "cv": 0.01},
              "cpu_share": 0.99,
              "measurements": {**key, "time": median, "rate": flops / median / ranks / 1e9
                               if median else None, "exposed": 20.0},
              "units": {"time": "ms", "rate": "TF/s/rank", "exposed": "%"},
              "model": {"flops": flops, "bytes_wire": 1e6},
              "status": {"result": result, "reasons": [] if result == "VALID" else [REASON],
                         "measured": result == "VALID"}}
    return line("row", **{**fields, **more})


def end_line(run: str, result: str = "VALID") -> str:
    fom = [{"metric": "attention_rate", "value": 0.1, "unit": "TFLOP/s/rank",
            "tags": {"pass": "fwd"}}]
    return line("end", run=run, end="2026-01-31T12:00:02Z", memory={},
                verification={"passed": True}, fom=fom, status={"result": result, "reasons": []})


def times_around(median: float, count: int, spread: float, rng: random.Random) -> list[float]:
    """Samples of one run: some scatter, and now and then a slow one."""
    slow = [rng.expovariate(1) * 5 * spread if rng.random() < 0.05 else 0 for _ in range(count)]
    return [median * math.exp(rng.gauss(0, spread) + more) for more in slow]


def write_results(file: Path, rows: Iterable[tuple[dict[str, Any], list[float]]], ranks: int = 2,
                  change: Callable[[str], str] = lambda text: text) -> None:
    """One run that ended. `change`: is given the whole text."""
    text = (run_line("r1", ranks)
            + "".join(row_line("r1", key, times, ranks=ranks) for key, times in rows)
            + end_line("r1"))
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(change(text), encoding="utf-8")
