"""Programs in surroundings that are not theirs, one process a case, for fuzz.py.

    outputs   an output is a device, a FIFO, a socket, a folder, a link, or an input of the run
    inputs    an input, --config or --machine is one of these, or endless, empty, of a terabyte
    streams   stdin, stdout or stderr is closed, full, or has lost its reader
    limits    of file size, open files, memory, stack

A case is `wrong` when it ends with 0 but an output is missing or is not whole, when it ends otherwise without a word, or
leaves part of an output, when a special file is not what it was, and when an input was changed. A run of one rank waits for
nobody, but for who reads a FIFO: what --timeout has to end is a hang. One case in eight is launched on two ranks, to each of which it happens.
"""

import json
import os
import pathlib
import shlex
import shutil
import signal
import socket
import stat
import subprocess
import time

import h5py

CLASSES = ("outputs", "inputs", "streams", "limits")
CODES = (0, 1, 2, 3, 77)  # 4 is a hang
PATIENCE = 30  # seconds of a process; it is told to be patient for a quarter of them
FULL, DEVICES = "/dev/full", {"null": (1, 3), "zero": (1, 5), "full": (1, 7)}
NAMED = ("below a file", "without a folder", "of 300 letters", "")
OUTPUT_KINDS = ("fifo", "socket", "folder", "loop", "nowhere", "stdout", "input", "input", *DEVICES, *NAMED)
INPUT_KINDS = ("fifo", "socket", "folder", "loop", "nowhere", "no bytes", "other bytes", "sparse", *DEVICES, *NAMED)
LIMITS = {"f": (1, 2, 8, 64, 512, 4096), "n": (3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 32), "s": (512, 1024, 4096),
          "v": (400_000, 600_000, 800_000, 1_200_000, 2_400_000), "d": (8_000, 32_000, 64_000, 128_000, 256_000)}


class In(str):
    """A word that names an input."""


def programs(source, seeds):
    """{program: (words, options that name outputs)}; small, and with work for two ranks."""
    inputs = source / "inputs"
    machine = inputs / "machines" / "h100-sxm-8.toml"
    table = ("-J", "--csv")
    attention = ["--tokens", "8", "--heads", "1", "--kv-heads", "1", "--head-dim", "4", "--schedule", "ring"]
    return {
        "import": ([In(source / "src/core/label.hpp")], ("-o",)),
        "pack": (["--input", In(seeds / "docs.h5"), "--capacity", "1K", "--cp", "2", "--oversize", "own-bin"], ("-o", *table)),
        "shard": (["--input", In(seeds / "packed.h5"), "--cp", "2", "--layout", "striped"], ("-o", "--svg", *table)),
        "attention": (["--input", In(inputs / "golden/attention_head_dim_1.h5"), "-n", "1", "-w", "0"], ("-o", "--trace", *table)),
        "attention --explain": ([*attention, "--explain", "--cp", "2"], ("--svg", *table)),
        "recurrence": (["--input", In(inputs / "golden/recurrence_documents.h5"), "-n", "1", "-w", "0"], ("-o", *table)),
        "logprobs": (["--input", In(inputs / "logprobs_golden.h5"), "--op", "logprob", "-n", "1", "-w", "0"], ("-o", *table)),
        "pipeline": (["--input", In(inputs / "docs_tiny.h5"), "--model", In(inputs / "model_tiny.h5"), "-n", "1"], ("-o", *table)),
        "predict": (["--machine", In(machine), "--cp", "2", "--tokens", "64"], ("--svg", "--trace", *table)),
        "compare": ([In(seeds / "docs.h5"), In(seeds / "docs.h5")], ()),
        "info": (["--quick"], ("-J",)),
    }


def make_special(kind, folder, replaced):
    """A file of this kind in `folder`, and the name by which it is given. `replaced`: an input, --config or --machine."""
    path = folder / "special"
    if kind in DEVICES:
        try:
            os.mknod(path, stat.S_IFCHR | 0o666, os.makedev(*DEVICES[kind]))
        except PermissionError:  # nor may a program replace what the link names
            path.symlink_to(f"/dev/{kind}")
    elif kind == "fifo":
        os.mkfifo(path)
    elif kind == "socket":
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(path))
    elif kind == "folder":
        path.mkdir()
    elif kind in ("loop", "nowhere", "stdout"):
        path.symlink_to({"loop": path, "nowhere": folder / "nothing", "stdout": "/proc/self/fd/1"}[kind])
    elif kind == "input":
        return replaced
    elif kind == "sparse":
        path.touch()
        os.truncate(path, 1 << 40)
    elif kind in ("no bytes", "other bytes"):
        path.write_bytes(b"\x89HDF\r\n\x1a\n\0{[=\xff" * 9 if kind == "other bytes" else b"")
    elif kind == "below a file":
        path.touch()
        return path / "x"
    elif kind == "without a folder":
        return folder / "no" / "folder"
    elif kind == "of 300 letters":
        return folder / ("x" * 300)
    else:
        return ""
    return path


def looks(path):
    """What must not change of a file: what it is; of an input, what it holds."""
    try:
        state = os.lstat(path)
    except OSError:
        return None
    kind = stat.S_IFMT(state.st_mode)
    if kind == stat.S_IFREG and state.st_size < 1 << 30:
        return kind, state.st_ino, pathlib.Path(path).read_bytes()
    return kind, state.st_ino, state.st_rdev, os.readlink(path) if kind == stat.S_IFLNK else ""


def is_whole(path):
    try:
        if path.suffix == ".h5":
            with h5py.File(path) as file:
                return "schema" in file.attrs
        text = path.read_text()
        return bool(text) and (path.suffix != ".json" or isinstance(json.loads(text), dict))
    except (OSError, ValueError):
        return False


class Case:
    """One process: the words of its program, what surrounds it, and what is kept an eye on."""

    def __init__(self, kind, bases, seeds, folder, rng):
        self.kind, self.folder, self.rng, self.around, self.setup, self.watched = kind, folder, rng, "", "", []
        self.streams, self.code, self.fifo = {}, None, None
        self.name = rng.choice(sorted(bases))
        words, options = bases[self.name]
        self.words = list(words)
        self.outputs = []
        for option in options:
            if option == "-o" and self.name == "import" or rng.random() < (0.9 if kind == "outputs" else 0.6):
                suffix = {"-o": "h5", "-J": rng.choice(("json", "json", "jsonl"))}.get(option, option[2:])
                suffix = "json" if option == "--trace" or self.name == "info" and option == "-J" else suffix
                self.outputs.append(folder / "out" / f"{option.strip('-')}.{suffix}")
                self.words += [option, str(self.outputs[-1])]
        config = folder / "config.toml"
        config.write_text("verbose = true\n")
        for option, path in (("--config", config), ("--machine", seeds / "machine.json")):
            if rng.random() < 0.25 and (option == "--config" or options[-2:] == ("-J", "--csv") and self.name != "predict"):
                self.words += [option, In(path)]
        self.words += ["--timeout", str(PATIENCE / 4)]
        self.ranks = 2 if rng.random() < 0.125 and self.name not in ("predict", "attention --explain") else 1
        getattr(self, f"draw_{kind}")()

    def watch(self, path):
        self.watched.append((path, looks(path)))

    def draw_outputs(self):
        if not self.outputs:
            return
        how, taken = self.rng.choice(OUTPUT_KINDS), self.rng.choice(self.outputs)
        places = [i for i, word in enumerate(self.words) if isinstance(word, In)]
        for place in places:  # which may be overwritten
            copy = self.folder / f"{place}{pathlib.Path(self.words[place]).suffix}"
            self.words[place] = In(shutil.copy(self.words[place], copy))
        inputs = [self.words[place] for place in places]
        if how == "input" and not inputs:
            how = "folder"
        name = make_special(how, self.folder, self.rng.choice(inputs) if inputs else None)
        self.words[self.words.index(str(taken))] = str(name)
        self.outputs.remove(taken)
        self.around = f"an output is {how or 'without a name'}"
        if how == "fifo":
            self.fifo = (name, self.rng.random() < 0.5)
            self.around += " with a reader" if self.fifo[1] else " without a reader"
        for path in {str(name), *inputs} - {""}:
            self.watch(path)

    def draw_inputs(self):
        places = [i for i, word in enumerate(self.words) if isinstance(word, In)]
        if places:
            how, place = self.rng.choice(INPUT_KINDS), self.rng.choice(places)
            name = make_special(how, self.folder, None)
            self.words[place] = str(name)
            self.around = f"an input is {how or 'without a name'}"
            self.setup = "ulimit -v 6000000; "
            if name:
                self.watch(name)

    def draw_streams(self):
        for stream, number in (("stdin", 0), ("stdout", 1), ("stderr", 2)):
            how = self.rng.choice(("closed", "full", "without a reader", "", ""))
            if how == "without a reader" and (self.ranks > 1 or number == 0):
                how = ""
            if how:
                self.around += f"{stream} is {how}; "
                self.streams[number] = how
                self.setup += f"exec {number}>&-; " if how == "closed" else f"exec {number}<>{FULL}; " if how == "full" else ""
        if self.rng.random() < 0.5:  # an error must be printed
            self.words += ["--nosuch"]
            self.code = 2

    def draw_limits(self):
        letter = self.rng.choice(list(LIMITS))
        limit = self.rng.choice(LIMITS[letter])
        self.around, self.setup = f"ulimit -{letter} {limit}", f"ulimit -{letter} {limit}; "

    def command(self, site):
        program, *more = self.name.split()
        rank = ["sh", "-c", f'{self.setup}exec "$@"', "sh", str(site["apps"] / f"gyre-{program}"), *more, *map(str, self.words)]
        return ([site["mpiexec"], "-n", str(self.ranks)] if self.ranks > 1 else []) + rank

    def run(self, site):
        """(exit code or None, what it said)"""
        pipes, said = [], self.folder / "said"
        reader = os.open(self.fifo[0], os.O_RDONLY | os.O_NONBLOCK) if self.fifo and self.fifo[1] else None
        with open(said, "wb") as text:
            where = {"stdin": subprocess.DEVNULL, "stdout": text, "stderr": text}
            for number, how in self.streams.items():
                if how == "without a reader":
                    lost, writer = os.pipe()
                    os.close(lost)
                    pipes.append(writer)
                    where[("stdin", "stdout", "stderr")[number]] = writer
            process = subprocess.Popen(self.command(site), cwd=self.folder, start_new_session=True, **where)
            for writer in pipes:
                os.close(writer)
            try:
                code = process.wait(timeout=PATIENCE)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
                code = None
        if reader is not None:
            os.close(reader)
        return code, said.read_text(errors="replace")[-2000:]

    def left(self):
        """Outputs of a run that failed, when what cleans up has had its time; rows stay."""
        deadline = time.monotonic() + 2
        while left := [p.name for p in (self.folder / "out").iterdir() if p.suffix != ".jsonl"]:
            if time.monotonic() > deadline:
                break
            time.sleep(0.02)
        return left

    def verdict(self, code, said):
        """(end, message)"""
        if code == 4 and (self.kind == "limits" and self.ranks > 1 or self.fifo and not self.fifo[1]):
            return "timeout", ""  # the system could not start the other rank; or nobody came to read
        if code in (None, 4):
            return "hang", "it did not end" if code is None else "--timeout had to end it"
        if self.kind == "limits" and ("loading shared librar" in said or code in (126, 127)):
            return "refused", ""  # the system could not start it
        if code not in CODES:
            return "signal", f"exit {code}: {said[-300:]}"
        for path, before in self.watched:
            if looks(path) != before:
                return "wrong", f"exit {code}: {path} was {'replaced or changed' if os.path.lexists(path) else 'removed'}"
        whole = [path for path in self.outputs if path.suffix != ".jsonl"]
        if code == 0:
            if bad := [path.name for path in whole if not is_whole(path)]:
                return "wrong", f"exit 0, but not whole: {bad}"
            if self.streams.get(1):
                return "wrong", "exit 0, but what it said was lost"
        elif self.streams.get(1):  # the files come before the text
            if bad := [path.name for path in whole if path.exists() and not is_whole(path)]:
                return "wrong", f"exit {code}, but not whole: {bad}"
        elif left := self.left():
            return "wrong", f"exit {code}, and left: {left}: {said[-200:]}"
        elif not said.strip() and not self.streams:
            return "wrong", f"exit {code} without a word"
        if self.code is not None and code != self.code:
            return "wrong", f"exit {code}, not {self.code}: {said[-200:]}"
        return ("accepted" if code == 0 else "refused"), ""


def run_case(site, kind, folder, rng):
    """(end, what was run): one case in a folder of its own, which is removed."""
    shutil.rmtree(folder, ignore_errors=True)
    (folder / "out").mkdir(parents=True)
    case = Case(kind, site["programs"], site["seeds"], folder, rng)
    end, message = case.verdict(*case.run(site))
    shutil.rmtree(folder, ignore_errors=True)
    words = shlex.join(case.command(site)).replace(str(site["apps"]) + "/", "").replace(str(folder) + "/", "")
    return end, f"{case.around}: {words}: {message}"
