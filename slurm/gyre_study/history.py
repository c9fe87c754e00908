"""How long launches took: what a plan expects of the same cases, of any build, on the same machine."""

import json
from pathlib import Path
from statistics import median
from typing import Any

from .cases import Case


def events(file: Path) -> list[dict[str, Any]]:
    """Of a .state file. A job that is ended in the middle of a line leaves a torn one, which is left out."""
    found = []
    for line in file.read_text(encoding="utf-8").splitlines():
        try:
            found.append(json.loads(line))
        except ValueError:
            continue
    return found


def seconds_by_kin(folders: list[Path]) -> dict[str, float]:
    """Median over launches that ended well: their seconds, shared evenly by their cases."""
    found: dict[str, list[float]] = {}
    for folder in folders:
        for file in sorted((folder / "jobs").glob("*/submission.json")):
            times: dict[tuple[str, str], float] = {}
            good: set[str] = set()
            for state in file.parent.glob("*.state"):
                for event in events(state):
                    times[event["launch"], event["event"]] = event["time"]
                    if event.get("code") == 0:
                        good.add(event["launch"])
            for launch in json.loads(file.read_text(encoding="utf-8"))["launches"]:
                name = launch["id"]
                if name in good and (name, "begin") in times:
                    each = (times[name, "end"] - times[name, "begin"]) / len(launch["kin"])
                    for kin in launch["kin"]:
                        found.setdefault(kin, []).append(each)
    return {kin: median(values) for kin, values in found.items()}


def expected_seconds(cases: list[Case], known: dict[str, float]) -> float | None:
    """Of all the cases, or None when one of them was never run."""
    if any(case.kin not in known for case in cases):
        return None
    return sum(known[case.kin] for case in cases)
