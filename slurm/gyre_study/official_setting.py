"""How an official result was measured: command, options, build, hosts and times, held against the problem."""

import re
import subprocess
from collections.abc import Sequence
from datetime import datetime, timedelta, timezone
from functools import lru_cache
from pathlib import Path
from typing import Any

from .app import App
from .cases import Placement
from .errors import nearest
from .official_rules import differ, shown
from .official_work import Work
from .results import Run, portable
from .sizes import parse_size

ROOT = Path(__file__).resolve().parents[2]  # a clone, or PREFIX/share/gyre

# Defaults of all options that tell results apart; "|": one of these is recorded. A test compares them with --help.
DEFAULTS = {
    "gyre-attention": """
        input= gen= capacity=0 tokens=4096 min=0 max=0 factor=2 step=0 cycles=1 batch=1 heads=8 kv-heads=8 head-dim=64
        v-head-dim=0 shared-key-dim=0 mask=causal window=0 queries=0 sinks=false seed=1 dtype=f32 cp=0 replay=false auto=false schedule=ring
        layout=dual-chunk-swap backend=cpu comm=|mpi|staged|mpi-gpu|nccl share-gpus=false threads=1 pass=both iters=auto
        max-seconds=1 warmup=1 check=|last check-pairs=262144 tol-scale=1 tflops=0.1 gbps=5 latency-us=10 partial-out=f32
        partial-dq=f32 wire-dkv= inner=0 heads-at-once=1 collectives=messages merge=at-once stripe=1 chunk=0 pairs-per-key=0 groups=any
        kernel=auto deterministic=false cuda-graph=false emulate-network= emulate-compute=""",
    "gyre-logprobs": """
        input= tokens=512 min=0 max=0 factor=2 step=0 cycles=1 sequences=1 gen= capacity=0 vocab=32768 padded=0 shards=
        picks=64 hidden=128 temperature=1 top-k=0 min-p=0 top-p=0.9 label-smoothing=0.1 focal-gamma=2
        filter-per-token=false dtype=f32 logit-scale=1 peaks=32 peak-height=12 zero-fraction=0 seed=1 op=|all
        method=gyre backend=cpu comm=|mpi|staged|mpi-gpu|nccl share-gpus=false tp=0 cp=0 layout=dual-chunk-swap
        threads=1 pass=both iters=auto max-seconds=1 warmup=1 check=last check-tokens=64 ties=exact tol-scale=1
        stripe=1 layout-chunk=0 pairs-per-key=0 groups=any gather-gradient=|split chunk=0 list-length=64 in-place=true
        f32-output=false""",
    "gyre-pack": """
        input= gen= unpack=false algorithm= capacity=0 min-bins=0 bin-multiple=1 max-items=0 seed=1 oversize=reject
        share-prefixes=false min-prefix=64 heads=32 kv-heads=8 head-dim=128 dtype=bf16 tflops=400 gbps=50
        cp=1 dp=1 tp=1 backend=cpu comm=|mpi|staged|mpi-gpu|nccl share-gpus=false iters=1
        max-seconds=1 check=last chunks=1 tail=own-segment stream-multiple=1 stream-slots=0 rows=0 mtp=1 repad=false
        yours= encoder= tp-rounding=per-rank unpacked=false attention= fused-flag=unset device= gradient-probe=not-run forward-only=false linear-attention=false""",
    "gyre-pipeline": """
        input= gen= model= teacher= bin=0 share-prefixes=false min-prefix=64 dtype=f32 residual=f32 dp=1 cp=0 tp=1 auto=false
        layout=dual-chunk-swap schedule=ring backend=cpu comm=|mpi|staged|mpi-gpu|nccl share-gpus=false iters=auto
        max-seconds=1 warmup=0 check=last check-tokens=4096 check-seconds=10 tol-scale=1 stripe=1 chunk=0
        pairs-per-key=0 groups=any inner=0 heads-at-once=1 collectives=messages merge=at-once recurrent-layout=contiguous state-schedule=state-gather""",
}
# What the first programs whose results are accepted recorded; later ones record more.
RECORDED = {
    "gyre-attention": """documents tokens source heads kv_heads head_dim mask window sinks dtype partial_out partial_dq
        wire_dkv cp kernel deterministic cuda_graph threads iters warmup network compute check""",
    "gyre-logprobs": """tokens sequences source vocab columns columns_of_rank dtype picks hidden temperature top_k top_p
        list_length chunk in_place f32_output zero_fraction layout gather_gradient tp cp threads iters warmup check ties""",
    "gyre-pack": "source cp capacity dp iters",
    "gyre-pipeline": """documents tokens bin grid layout schedule parameters dtype residual iters warmup check""",
}


def defaults_of(app: str) -> dict[str, list[str]]:
    """By the option's name: the values that say that it was not given."""
    return {name: values.split("|") for name, _, values in (word.partition("=") for word in DEFAULTS[app].split())}


def words_of(arguments: Sequence[str]) -> tuple[dict[str, str], list[str]]:
    """Options and their values, and what belongs to no option. A flag's value is ""."""
    found: dict[str, str] = {}
    more: list[str] = []
    name = ""
    for word in arguments:
        if word.startswith("--") and word[2:] not in found:
            name = word[2:]
            found[name] = ""
        elif name and not word.startswith("--"):
            found[name], name = portable(word), ""
        else:
            more.append(word)
    return found, more


def differences(got: dict[str, Any], wanted: dict[str, Any], place: str, prefix: str) -> list[str]:
    """A reason for each name whose value is another one."""
    reasons = []
    for name in sorted({*got, *wanted}):
        if got.get(name) != wanted.get(name):
            own = f"{prefix}{name} {got[name]}" if name in got else f"no {prefix}{name}"
            theirs = f"has {wanted[name]}" if name in wanted else f"has no {prefix}{name}"
            reasons.append(f"{place}{own}; the problem {theirs}")
    return reasons


def misstated_command(run: Run, placement: Placement, app: App, accept: str) -> list[str]:
    program, *arguments = run.head["run"]["argv"]
    got, more = words_of(arguments)
    wanted = {**words_of(placement.arguments)[0], "json": f"{placement.name}.jsonl", "resume": accept}
    for name in app.swept:
        planned = {str(case.axes[name]) for case in placement.cases if name in case.axes}
        said = got.get(name, "")
        if planned and (said == "all" or {*said.split(",")} <= planned):
            wanted[name] = said
        elif planned:
            wanted[name] = ",".join(sorted(planned))
    wrong = [f"{word!r} belongs to no option; the problem has no such word" for word in more]
    return differ("argv[0]", portable(program), app.name) + wrong + differences(got, wanted, "", "--")


# Options


def plain(value: Any) -> Any:
    """A value as it is compared: sizes, numbers and texts of numbers are numbers."""
    if value is None or isinstance(value, bool):
        return "" if value is None else str(value).lower()
    try:
        return float(parse_size(value) if isinstance(value, str) else value)
    except ValueError:
        try:
            return float(value)
        except ValueError:
            return portable(value)


def misstated_configuration(run: Run, app: str, work: Work) -> list[str]:
    """Every value must be a fact of the problem, else what the command gives, else the option's default."""
    stated, facts, defaults = run.head["configuration"], work.facts(), defaults_of(app)
    given = words_of(run.head["run"]["argv"][1:])[0]
    needed = {*RECORDED[app].split(), *({"source"} & {*facts})}
    wrong = [f"configuration has no {name}" for name in sorted(needed - {*stated})]
    for name, value in stated.items():
        option = name.replace("_", "-")
        if name in facts:
            right = facts[name] if isinstance(facts[name], tuple) else (facts[name],)
            fits = any(not differ("", portable(value), one) for one in right)
        elif option in given or option in defaults:
            right = (given[option] or True,) if option in given else tuple(defaults[option])
            fits = plain(value) in map(plain, right)
        else:
            wrong.append(f"configuration.{name} {shown(value)}: unknown; nearest: {nearest(name, [*facts, *defaults])}")
            continue
        if not fits:
            wrong.append(f"configuration.{name} {shown(value)}; the problem has {' or '.join(map(shown, right))}")
    return wrong


# Builds

SLOW_OR_LOOSE = re.compile(
    r"-O[^23]\S*|-O|-ffast-math|--?use_fast_math|-funsafe-math\S*|-ffinite-math\S*|-fassociative-math|-fno-signed-zeros"
    r"|-freciprocal-math|-ffp-model=(fast|aggressive)|-fsanitize\S*|--coverage|-fprofile-arcs|-pg|-UNDEBUG"
    r"|-D_GLIBCXX_DEBUG\S*"
)


def misstated_build(run: Run, app: App) -> list[str]:
    wrong = []
    build = run.build
    if build != {name: app.build.get(name) for name in build}:
        wrong.append(f"build {build['git']} ({build['git_state']}); planned with {app.build.get('git')}")
    if build["git_state"] != "clean":
        wrong.append(f"sources of the build are not those of a commit ({build['git_state']})")
    if build["type"] != "Release":
        wrong.append(f"{build['type']} build; wanted: Release")
    flags = run.head["build"].get("flags")
    version = tuple(map(int, build["version"].split(".")))
    writes = looks_up() and git("grep", "-l", '"flags"', build["git"], "--", "src/report")
    if flags is None and (version > (0, 2, 0) or writes):
        wrong.append(f"build has no flags, which programs of version {build['version']}, commit {build['git']} write")
    bad = [word for word in (flags or "").split() if SLOW_OR_LOOSE.fullmatch(word)]
    if bad:
        wrong.append(f"build.flags {bad[0]}; wanted: an optimised build that keeps IEEE arithmetic, -O2 or -O3")
    return wrong + misstated_commit(build["git"], build["version"], run.head["run"]["start"])


@lru_cache(maxsize=None)
def git(*words: str) -> str | None:
    """What git prints of this clone; None where it fails, or this is no clone with its whole history."""
    if not (ROOT / ".git").exists():
        return None
    try:
        done = subprocess.run(["git", "-C", str(ROOT), *words], capture_output=True, text=True, timeout=60, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def looks_up() -> bool:
    """Whether it can be known that there is no such commit."""
    return git("rev-parse", "--is-shallow-repository") == "false"


def misstated_commit(commit: str, version: str, start: str) -> list[str]:
    if not re.fullmatch(r"[0-9a-f]{7,40}", commit):
        return [f"git {commit}; wanted: a commit, such as 0123abcd"]
    if not looks_up():
        return []
    date = git("show", "-s", "--format=%ct", f"{commit}^{{commit}}")
    if date is None:
        return [f"git {commit}: unknown commit; this clone does not have it"]
    of_commit = re.search(r"VERSION (\d+\.\d+\.\d+)", git("show", f"{commit}:CMakeLists.txt") or "")
    wrong = differ("version", version, of_commit[1]) if of_commit else []
    made = datetime.fromtimestamp(int(date), timezone.utc) - timedelta(days=1)  # clocks of hosts differ
    if moment(start) < made:
        wrong.append(f"run.start {start}; its commit {commit} is of {made + timedelta(days=1):%Y-%m-%d}")
    return wrong


# Hosts


def cpus_of(text: str) -> set[int]:
    """Of "0-3,8"."""
    found: set[int] = set()
    for part in text.split(","):
        first, _, last = part.partition("-")
        found |= {*range(int(first), int(last or first) + 1)}
    return found


def hosts_of(run: Run) -> dict[str, dict[str, Any]]:
    """By name: what the machine says of it."""
    machine = run.head["machine"]
    return {name: host for host in (machine["hosts"] if machine else ()) for name in host["names"]}


def misstated_ranks(run: Run, ranks: int, on_cpu: bool) -> list[str]:
    stated, hosts = run.head["ranks"], hosts_of(run)
    wrong = [] if len(stated) == ranks else [f"{len(stated)} ranks; wanted: {ranks}"]
    if [one["rank"] for one in stated] != [*range(len(stated))]:
        wrong.append(f"ranks {', '.join(str(one['rank']) for one in stated)}; wanted: 0 to {ranks - 1}")
    for one in stated:
        if one["host"] not in hosts:
            wrong.append(f"rank {one['rank']}: host {one['host']!r}; the machine's: {', '.join(hosts)}")
        if not one.get("cpus") or not one.get("numa"):
            wrong.append(f"rank {one['rank']} has no cpus or numa")
        cuda = run.head["libraries"].get("cuda", "no")
        if not on_cpu and cuda.startswith(("no", "software GPU")):
            wrong.append(f"rank {one['rank']}: device {one['device']!r} with libraries.cuda {cuda!r}")
        if (one["device"] == "cpu") != on_cpu:
            wrong.append(f"rank {one['rank']}: device {one['device']!r}; wanted: {'cpu' if on_cpu else 'a GPU'}")
    devices = [one.get("device_uuid") or (one["host"], one["device"].split(" ")[0]) for one in stated]
    if not on_cpu and len({*devices}) < len(devices):
        wrong.append("several ranks have one device; wanted: one each")
    of_ranks = {one["host"] for one in stated}
    if {*hosts} != of_ranks:
        wrong.append(f"machine.hosts {', '.join(hosts)}; those of the ranks: {', '.join(sorted(of_ranks))}")
    return wrong


def crowded(run: Run, threads: int) -> list[str]:
    """Hardware threads to which more ranks are bound than they can run."""
    on_host: dict[str, list[set[int]]] = {}
    for one in run.head["ranks"]:
        if one.get("cpus"):
            on_host.setdefault(one["host"], []).append(cpus_of(one["cpus"]))
    for host, sets in on_host.items():
        for own in sets:
            inside = sum(other <= own for other in sets)
            if inside * threads > len(own):
                few = ",".join(map(str, sorted(own)[:8]))
                bound = f"bound to {len(own)} CPUs of {host} ({few})"
                return [f"{inside} ranks of {threads} threads are {bound}; wanted: a core each"]
    return []


def misstated_hosts(run: Run) -> list[str]:
    wrong = []
    for name, host in hosts_of(run).items():
        numa = [cpus_of(one["cpus"]) for one in host["numa"] if one["cpus"]]
        threads, cores, sockets = host["threads"], host["cores"], host["sockets"]
        if not threads or not cores or not sockets or not host["cpu"]:
            wrong.append(f"host {name} has no cpu, sockets, cores or threads")
        elif threads % cores or cores % sockets or (numa and sum(map(len, numa)) != threads):
            wrong.append(f"host {name}: {sockets} sockets, {cores} cores, {threads} threads,"
                         f" {sum(map(len, numa))} CPUs of NUMA nodes; wanted: numbers that fit")
        for one in run.head["ranks"]:
            if one["host"] == name and one.get("cpus") and not cpus_of(one["cpus"]) <= set().union(*numa):
                wrong.append(f"rank {one['rank']}: cpus {one['cpus']}; host {name} has no such CPUs")
    return wrong


KIND = ("cpu", "cpu_family", "cpu_model", "cpu_stepping", "sockets", "cores", "threads", "gpus")


def of_several_machines(runs: Sequence[Run]) -> list[str]:
    """What tells the runs' hosts, libraries or environments apart. Hosts of one name are one host."""
    wrong = []
    hosts: dict[str, dict[str, Any]] = {}
    largest = max(runs, key=lambda run: len(run.head["ranks"]))
    kinds = [{name: host[name] for name in KIND} for host in hosts_of(largest).values()]
    for run in runs:
        for name, host in hosts_of(run).items():
            bare = {key: value for key, value in host.items() if key != "names"}
            wrong += [f"host {name}: {key} {shown(bare[key])} and {shown(value)}; wanted: one host under a name"
                      for key, value in hosts.setdefault(name, bare).items() if bare[key] != value]
            if {name: host[name] for name in KIND} not in kinds:
                wrong.append(f"host {name} is of another kind than those of the run with most ranks")
        for part in ("libraries", "environment", "build"):
            first, own = ({name: value.partition(" (seed ")[0] for name, value in one.head[part].items()
                           if not name.startswith("SLURM_")} for one in (runs[0], run))
            wrong += [f"{part}.{name} {own.get(name)!r} and {first.get(name)!r} in runs of one result"
                      for name in sorted({*first, *own}) if first.get(name) != own.get(name)]
        mpi = run.head["machine"]["mpi"] if run.head["machine"] else {}
        wrong += differ("machine.mpi.library", mpi.get("library"), run.head["libraries"].get("mpi"))
        first_mpi = (runs[0].head["machine"] or {"mpi": {}})["mpi"]
        for name in ("device", "transport"):
            wrong += differ(f"machine.mpi.{name}", mpi.get(name), first_mpi.get(name))
    return wrong


# Times


def moment(text: str) -> datetime:
    """Of a text that is no date: the first year."""
    try:
        return datetime.strptime(text, "%Y-%m-%dT%H:%M:%SZ").replace(tzinfo=timezone.utc)
    except ValueError:
        return datetime.min.replace(tzinfo=timezone.utc)


def misstated_times(run: Run) -> list[str]:
    """Whether the run lasted as long as its samples. Whole seconds are stated."""
    start, last = run.head["run"]["start"], run.end["end"] if run.end else None
    stamps = [start, *(row.time for row in run.rows), *([last] if last else [])]
    is_right = stamps == sorted(stamps) and all(moment(one).year > 2000 for one in stamps)
    wrong = [] if is_right else [f"times {', '.join(stamps)}; wanted: dates that ascend"]
    wrong += [f"measurements.finished {row.data['measurements']['finished']}; its row was written at {row.time}"
              for row in run.rows if "finished" in row.data["measurements"]
              and not start <= str(row.data["measurements"]["finished"]) <= row.time]
    if last:
        took, measured = (moment(last) - moment(start)).total_seconds(), sum(sum(row.slowest()) for row in run.rows) / 1e3
        if measured > took + 2:
            wrong.append(f"samples of {measured:.3g} s in a run of {took:.3g} s")
    return wrong
