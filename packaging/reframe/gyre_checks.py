"""Gyre as checks of ReFrame: results are verified, and the rates of FOM lines compared with references.

    reframe -C settings.py -c gyre_checks.py -r --report-file report.json      # programs are on PATH, or -S folder=DIR
    python3 gyre_checks.py report.json >references.json                        # the rates of this run as references
    GYRE_REFERENCES=references.json reframe -C settings.py -c gyre_checks.py -r

-S num_tasks=N sets the number of ranks (2), -S slower=0.2 by how much a rate may fall short of its reference (0.1).
"""

import json
import os
import re
import sys

try:
    import reframe as rfm
    import reframe.utility.sanity as sn
except ImportError:  # references are made without ReFrame
    rfm = None

FOM = re.compile(r"^FOM \S+ (?P<name>\S+) (?P<value>\S+) (?P<unit>.+?)(?P<tags>( \S+=\S+)*)$", re.MULTILINE)


def rates(output):
    """{"attention_rate pass=fwd tokens=4096": (rate, unit)}; numbers that are no rates are left out.

    gyre-attention prints the rates of the fastest schedule and layout, and another run may have another fastest one: they
    are no part of the name.
    """
    found = {}
    for line in FOM.finditer(output):
        if "/s" in line["unit"]:
            tags = re.sub(r" (schedule|layout)=\S+", "", line["tags"])
            found[line["name"] + tags] = (float(line["value"]), line["unit"])
    return found


def references_of(report):
    """{"system:partition": {check: {rate: value}}} of a report of ReFrame."""
    found = {}
    for case in (case for session in report["runs"] for case in session["testcases"]):
        if case["result"] == "pass":
            for key, (value, *_) in case["perfvalues"].items():
                system, partition, rate = key.split(":", 2)
                found.setdefault(f"{system}:{partition}", {}).setdefault(case["name"], {})[rate] = value
    return found


if rfm:

    class GyreCheck(rfm.RunOnlyRegressionTest):
        valid_systems = ["*"]
        valid_prog_environs = ["*"]
        num_tasks = 2
        folder = variable(str, value="")
        slower = variable(float, value=0.1)

        @run_before("run")
        def find_program(self):
            self.executable = os.path.join(self.folder, self.executable)
            self.executable_opts = [word.format(ranks=self.num_tasks) for word in self.executable_opts]

        @sanity_function
        def results_are_right(self):
            return sn.all([sn.assert_found(r"^VERIFY PASSED", self.stdout), sn.assert_found(r"^RESULT ", self.stdout)])

        @run_before("performance")
        def compare_rates(self):
            with open(os.path.join(self.stagedir, self.stdout.evaluate()), encoding="utf-8") as output:
                found = rates(output.read())
            place = self.current_partition.fullname
            known = {}
            if path := os.environ.get("GYRE_REFERENCES"):
                with open(path, encoding="utf-8") as file:
                    known = json.load(file).get(place, {}).get(self.name, {})
            for name in known:  # a rate that is no longer printed is not reached
                found.setdefault(name, (0.0, ""))
            self.perf_variables = {
                name: sn.make_performance_function(sn.defer(value), unit) for name, (value, unit) in found.items()
            }
            self.reference = {
                place: {
                    name: (known[name], -self.slower, None, unit) if name in known else (0, None, None, unit)
                    for name, (_, unit) in found.items()
                }
            }

    @rfm.simple_test
    class attention(GyreCheck):
        executable = "gyre-attention"
        executable_opts = ["--tokens", "4K", "--schedule", "all"]

    @rfm.simple_test
    class logprobs(GyreCheck):
        executable = "gyre-logprobs"
        executable_opts = ["--op", "all", "--tp", "{ranks}", "--tokens", "256", "--vocab", "32K"]

    @rfm.simple_test
    class shard(GyreCheck):
        executable = "gyre-shard"
        executable_opts = ["--gen", "dist=long-tailed,count=64,max=4K", "--capacity", "16K", "--cp", "{ranks}"]


if __name__ == "__main__":
    with open(sys.argv[1], encoding="utf-8") as file:
        print(json.dumps(references_of(json.load(file)), indent=1))
