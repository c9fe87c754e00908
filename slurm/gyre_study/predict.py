"""Predicts cases by the machine model of a site: gyre-attention --explain, for sites that have a [model]."""

import os
import re
import subprocess

from .app import QUIET, App
from .cases import Case, Expansion, Placement
from .files import Site

MOST_RANKS = 64  # plans for more ranks take long to simulate
# Options that --explain does not read.
LEFT_OUT = (
    "iters max-seconds warmup check check-pairs tol-scale threads backend comm share-gpus emulate-network "
    "emulate-compute kernel timeout machine pass cp"
).split()
TIME = re.compile(r"^# all ranks: .*; ([\d.]+) (s|ms|us|ns), compute only")
IN_MS = {"s": 1e3, "ms": 1.0, "us": 1e-3, "ns": 1e-6}


def options_left(arguments: list[str]) -> list[str]:
    """Arguments without those that --explain does not read, and their values."""
    left: list[str] = []
    keep = True
    for word in arguments:
        if word.startswith("--"):
            keep = word[2:] not in LEFT_OUT
        if keep:
            left.append(word)
    return left


def times_of(text: str) -> dict[str, float]:
    """Milliseconds of "fwd" and "bwd"."""
    found: dict[str, float] = {}
    direction = ""
    for line in text.splitlines():
        if line in ("# forward", "# backward"):
            direction = "fwd" if line == "# forward" else "bwd"
        match = TIME.match(line)
        if match and direction:
            found[direction] = float(match[1]) * IN_MS[match[2]]
    return found


def predict_case(case: Case, placement: Placement, app: App, site: Site) -> dict[str, float]:
    axes = [
        word
        for name, value in case.axes.items()
        if name in app.swept
        for word in (f"--{name}", str(value))
    ]
    model = [
        "--tflops",
        site.model["tflops"],
        "--gbps",
        site.model["gbps"],
        "--latency-us",
        site.model["latency_us"],
    ]
    command = [
        app.path,
        "--explain",
        "--cp",
        placement.ranks,
        *options_left(placement.arguments),
        *axes,
        *model,
    ]
    try:
        done = subprocess.run(
            [str(word) for word in command],
            capture_output=True,
            text=True,
            timeout=60,
            env={**os.environ, **QUIET},
            check=False,
        )
    except subprocess.TimeoutExpired:
        return {}
    return times_of(done.stdout) if done.returncode == 0 else {}


def predict(expansion: Expansion, app: App, site: Site) -> dict[str, dict[str, float]]:
    """Predictions by case; none for other programs, sites without a model, over MOST_RANKS ranks or emulated networks."""
    if not site.model or "explain" not in app.options:
        return {}
    found: dict[str, dict[str, float]] = {}
    of_kin: dict[str, dict[str, float]] = {}  # repetitions of a case are predicted once
    for placement in expansion.placements:
        if placement.ranks > MOST_RANKS or placement.common.get("network", "none") != "none":
            continue
        for case in placement.cases:
            if case.kin not in of_kin:
                of_kin[case.kin] = predict_case(case, placement, app, site)
            if of_kin[case.kin]:
                found[case.id] = of_kin[case.kin]
    return found
