"""The machine that a benchmark runs on."""

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
