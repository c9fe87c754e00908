"""How long launches took: what a plan expects of the same cases, of any build, on the same machine."""

from pathlib import Path
from statistics import median

from .cases import Case
from .folder import SUBMISSION, read_events
from .shapes import read_json


def seconds_by_kin(folders: list[Path]) -> dict[str, float]:
    """Median over launches that ended well: their seconds, shared evenly by their cases."""
    found: dict[str, list[float]] = {}
    for folder in folders:
        for file in sorted((folder / "jobs").glob("*/submission.json")):
            times: dict[tuple[str, str], float] = {}
            good: set[str] = set()
            for state in file.parent.glob("*.state"):
                for event in read_events(state):
                    times[event["launch"], event["event"]] = event["time"]
                    if event["event"] == "end" and event.get("code") == 0:
                        good.add(event["launch"])
            for launch in read_json(file, SUBMISSION)["launches"]:
                name = launch["id"]
                if name in good and (name, "begin") in times:
                    each = (times[name, "end"] - times[name, "begin"]) / len(launch["kin"])
                    for kin in launch["kin"]:
                        found.setdefault(kin, []).append(each)
    return {kin: median(values) for kin, values in found.items()}


def expected_seconds(cases: list[Case], known: dict[str, float]) -> float | None:
    """Expected seconds of all the cases, or None if one of them was never run."""
    if any(case.kin not in known for case in cases):
        return None
    return sum(known[case.kin] for case in cases)
