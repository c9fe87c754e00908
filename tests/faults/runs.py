"""What the fault trials run: five programs on four ranks and small inputs, their processes, and what they leave."""

import hashlib
import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import time

import h5py
import numpy

RANKS = 4
TAG = "GYRE_FAULT_TRIAL"
# Timings and what follows from them; beside these, what clean runs say alike is what every run must say.
TIMED = re.compile(r"overlap|exposed|(time|min|p95|cv|reps|finished|compute_only|communication_only|exposed|planning|/s|rate|of_bw\w*|share_of_limit)$|per_s|speedup")


class Program:
    """One program with its arguments; `outputs`: options that name a file, and what it is called."""

    def __init__(self, name, arguments, ranks=RANKS, outputs=(("-o", "out.h5"), ("-J", "out.json"))):
        self.name, self.arguments, self.ranks, self.outputs = name, list(map(str, arguments)), ranks, outputs


def programs(source, work):
    """The programs; `work`/packed.h5 must be there for gyre-shard."""
    inputs = pathlib.Path(source, "inputs")
    return [
        Program("pack", ["--input", f"{inputs}/docs_tiny.h5", "--capacity", "128", "--cp", "4"]),
        Program("shard", ["--input", f"{work}/packed.h5", "--cp", "4", "--layout", "balanced"]),
        Program("attention", ["--input", f"{inputs}/attention_causal.h5", "--schedule", "ring", "-n", "5"]),
        Program("logprobs", ["--input", f"{inputs}/logprobs_golden.h5", "--tp", "2", "-n", "5"]),
        Program("pipeline", ["--input", f"{inputs}/docs_tiny.h5", "--model", f"{inputs}/model_tiny.h5",
                             "--cp", "2", "--tp", "2", "-n", "1"]),
    ]


class Site:
    """Where things are, and how a program is launched."""

    def __init__(self, source, build, work, timeout):
        self.source, self.build, self.work, self.timeout = source, pathlib.Path(build), pathlib.Path(work), timeout
        self.mpiexec = os.environ.get("MPIEXEC", "mpiexec")
        self.shim = self.build / "tests" / "libgyre-mpi-fault.so"

    def program(self, name):
        return self.build / "apps" / f"gyre-{name}"

    def launch(self, program, folder, fault=None):
        """Starts a run that writes to folder/out; `fault` is for the library of mpi_fault.c."""
        out, log = folder / "out", folder / "log"
        out.mkdir(parents=True)
        log.mkdir()
        command = [self.mpiexec, "-n", str(program.ranks)]
        if fault is not None:
            for name, value in (("LD_PRELOAD", self.shim), ("GYRE_FAULT", fault), ("GYRE_FAULT_LOG", log)):
                command += ["-genv", name, str(value)]
        command += [str(self.program(program.name)), *program.arguments, "--timeout", f"{self.timeout:g}"]
        for option, name in program.outputs:
            command += [option, str(out / name)]
        with open(folder / "stdout", "wb") as stdout, open(folder / "stderr", "wb") as stderr:
            return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=stdout, stderr=stderr, cwd=folder,
                                    env={**os.environ, TAG: str(folder)}, start_new_session=True)

    def in_words(self, program):
        """The run as one would type it."""
        return f"mpiexec -n {program.ranks} gyre-{program.name} {' '.join(program.arguments)} --timeout {self.timeout:g}"


# Processes


def read_bytes(path):
    try:
        return pathlib.Path(path).read_bytes()
    except OSError:
        return b""


class Process:
    """One process of a trial, as it was when it was looked at."""

    def __init__(self, pid):
        self.pid = pid
        stat = read_bytes(f"/proc/{pid}/stat").decode(errors="replace")
        self.name = stat[stat.find("(") + 1:stat.rfind(")")]
        fields = stat[stat.rfind(")") + 2:].split()
        self.state, self.parent = (fields[0], int(fields[1])) if len(fields) > 1 else ("X", 0)
        match = re.search(rb"(?:^|\0)PMI_RANK=(\d+)", read_bytes(f"/proc/{pid}/environ"))
        self.rank = int(match[1]) if match else None

    def alive(self):
        return self.state not in "XZ"

    def __str__(self):
        where = read_bytes(f"/proc/{self.pid}/wchan").decode(errors="replace") or "?"
        return f"{self.name}[{self.pid}]{'' if self.rank is None else f' rank {self.rank}'} {self.state} in {where}"


def processes_of(folder):
    """All living processes of a trial: those with its tag, guards included."""
    tag = f"{TAG}={folder}".encode()
    found = []
    for entry in os.listdir("/proc"):
        if not entry.isdigit() or int(entry) == os.getpid():
            continue
        environment = read_bytes(f"/proc/{entry}/environ").split(b"\0")
        if tag in environment:
            process = Process(int(entry))
            if process.alive():
                found.append(process)
    return found


def ranks_of(folder):
    """(ranks, their parents): the programs of a trial. A rank is there when its parent has forked it; before, the program
    is being loaded, and what a signal does to it is between the launcher and the kernel."""
    found = {p.pid: p for p in processes_of(folder)
             if p.rank is not None and p.name.startswith("gyre-") and p.name != "gyre-guard"}
    parents = [p for p in found.values() if p.parent not in found]
    ranks = [p for p in found.values() if p.parent in found and found[p.parent].parent not in found]
    return ranks, [p for p in parents if p.pid in {rank.parent for rank in ranks}]


def end(processes):
    """Kills processes of a trial, by their numbers."""
    for process in processes:
        for number in (signal.SIGKILL, signal.SIGCONT):
            try:
                os.kill(process.pid, number)
            except ProcessLookupError:
                pass


def wait_until(condition, seconds, pause=0.02):
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(pause)
    return True


def alone():
    """Starts this program again with a /dev/shm of its own, where that is allowed (by root): what is left there is then
    certainly of its runs. Returns where it is not allowed, and in the new program."""
    marker = f"{TAG}_ALONE"
    if marker not in os.environ:
        mount = ["unshare", "--mount", "sh", "-c", 'mount -t tmpfs none /dev/shm && exec "$@"', "sh"]
        try:
            possible = subprocess.run([*mount, "true"], capture_output=True, check=False).returncode == 0
        except FileNotFoundError:
            possible = False
        if possible:
            os.environ[marker] = "1"
            os.execvp(mount[0], [*mount, sys.executable, *sys.argv])


def shared_memory():
    """Files that MPI libraries keep there; other programs have others."""
    return {name for name in os.listdir("/dev/shm") if name.startswith(("mpich_", "ucx_"))}


def unused(names):
    """Those of the files in /dev/shm that no process has open or mapped: nobody will remove them."""
    used = set()
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            for line in read_bytes(f"/proc/{entry}/maps").decode(errors="replace").splitlines():
                if "/dev/shm/" in line:
                    used.add(line.split("/dev/shm/")[1].split(" ")[0])
    return sorted(name for name in names - used if os.path.exists(f"/dev/shm/{name}"))


# Results


def digest_of(path):
    """What an output file says, apart from its provenance: names, types, shapes, bits, attributes."""
    digest = hashlib.sha256()

    def add(*parts):
        for part in parts:
            digest.update(repr(part).encode() if not isinstance(part, bytes) else part)

    def attributes(item):
        for name in sorted(set(item.attrs) - {"content_sha256"}):  # it covers the provenance
            add(name, numpy.asarray(item.attrs[name]).tolist())

    def visit(name, item):
        if name.split("/")[0] == "provenance":
            return
        attributes(item)
        if isinstance(item, h5py.Dataset):
            values = item[()]
            add(name, item.dtype.str, item.shape)
            add(repr(values.tolist()) if item.dtype.hasobject else numpy.ascontiguousarray(values).tobytes())

    with h5py.File(path, "r") as file:
        attributes(file)
        file.visititems(visit)
    return digest.hexdigest()


def leaves(value, path=""):
    """Every number and text of a JSON value, by its path."""
    if isinstance(value, dict):
        children = value.items()
    elif isinstance(value, list):
        children = enumerate(value)
    else:
        return {path: value}
    return {k: v for name, child in children for k, v in leaves(child, f"{path}/{name}").items()}


def figures_of(path):
    """What a result file says of results, checks and figures of merit, without timings; a timed figure is named by metric."""
    document = json.loads(path.read_text())
    found = leaves({"results": [[r["key"], r["measurements"], r["model"]] for r in document["results"]],
                    "checks": document["verification"], "inputs": document["inputs"]})
    for fom in document["fom"]:
        found[f"fom/{fom['metric']}/{fom['tags']}"] = fom["value"]
    return {name: value for name, value in found.items() if not TIMED.search(name)}


class Outcome:
    """How a run ended: exit code (None: not in time), its texts, what it wrote."""

    def __init__(self, folder, code):
        self.code = code
        self.stdout = (folder / "stdout").read_text(errors="replace")
        self.stderr = (folder / "stderr").read_text(errors="replace")
        self.text = self.stdout + self.stderr
        out = folder / "out"
        self.written = (out / "out.h5").exists()
        self.output = self.attempt(digest_of, out / "out.h5")
        self.figures = self.attempt(figures_of, out / "out.json")

    @staticmethod
    def attempt(read, path):
        """None for a file that is not there, or not whole."""
        try:
            return read(path)
        except (OSError, ValueError, KeyError, RuntimeError):
            return None

    def difference(self, clean):
        """'' when this is what a clean run says, else the first thing that differs."""
        if self.output is None or self.figures is None:
            return "no output file"
        if self.output != clean.output:
            return "the output file differs"
        for name, value in clean.figures.items():
            if self.figures.get(name) != value:
                return f"{name} is {self.figures.get(name)}, not {value}"
        return ""
