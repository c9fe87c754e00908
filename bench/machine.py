"""The machine that a benchmark runs on."""

import datetime
import json
import os
import platform


def processor():
    """The model of this processor."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            return next(line.split(":")[1].strip() for line in file if "model name" in line)
    except (OSError, StopIteration):
        return platform.processor() or "unknown processor"


def text():
    """A line for the head of a table."""
    return f"# {processor()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}"


def write_benchmarks(path, rows, **context):
    """Writes rows (dictionaries with a name) as a file in Google Benchmark's format."""
    now = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
    context = {"date": now, "processor": processor(), "num_cpus": os.cpu_count(), **context}
    with open(path, "w", encoding="utf-8") as file:
        json.dump({"context": context, "benchmarks": rows}, file, indent=1)
        file.write("\n")
