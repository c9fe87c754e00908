"""On what a study was measured: processors, GPUs, MPI and networks of its runs, as one reads them in a heading."""

import json
from collections.abc import Iterable
from typing import Any


def listed(texts: Iterable[str]) -> str:
    """Different texts, in order of appearance; n/a for none."""
    return "; ".join(dict.fromkeys(text for text in texts if text)) or "n/a"


def counted(count: int, what: str) -> str:
    return f"{count} {what}{'s' if count != 1 else ''}"


def processor(host: dict[str, Any]) -> str:
    parts = [host.get("cpu") or "unknown processor"]
    parts += [counted(host[f"{what}s"], what) for what in ("socket", "core") if host.get(f"{what}s")]
    if host.get("memory_bytes"):
        parts.append(f"{host['memory_bytes'] / 1e9:.0f} GB")
    if host.get("virtual_machine"):
        parts.append("virtual machine")
    return ", ".join(parts)


def gpus(host: dict[str, Any]) -> str:
    models = host.get("gpus") or []
    many = ", ".join(f"{models.count(model)} {model}" for model in dict.fromkeys(models))
    return f"{many}, driver {host['gpu_driver']}" if many and host.get("gpu_driver") else many


def library(mpi: dict[str, Any]) -> str:
    return ", ".join(mpi[name] for name in ("library", "device", "transport") if mpi.get(name))


def route(mpi: dict[str, Any], name: str) -> str:
    """"inside a host: cma/memory (short messages: sysv/memory)", or "" where it is unknown."""
    small, large = ((mpi.get(name) or {}).get(size) for size in ("small", "large"))
    if not large:
        return ""
    short = f" (short messages: {small})" if small and small != large else ""
    return f"{'inside a host' if name == 'inside_host' else 'between hosts'}: {large}{short}"


def machine_facts(machines: Iterable[str | None]) -> list[tuple[str, str]]:
    """Names and texts. `machines`: of each run, as JSON; None or "null" of one that says nothing of it."""
    found = [json.loads(one) or {} for one in machines if one]
    hosts = [host for one in found for host in one.get("hosts") or []]
    names = {name: processor(host) for host in hosts for name in host.get("names") or ["a host"]}
    kinds = [f"{counted(list(names.values()).count(kind), 'host')}: {kind}" for kind in names.values()]
    mpis = [one.get("mpi") or {} for one in found]
    routes = [route(mpi, name) for name in ("between_hosts", "inside_host") for mpi in mpis]
    facts = [("Processor", listed(kinds)), ("MPI", listed(map(library, mpis))), ("Network", listed(routes))]
    if any(map(gpus, hosts)):
        facts.insert(1, ("GPUs of a host", listed(map(gpus, hosts))))
    return facts
