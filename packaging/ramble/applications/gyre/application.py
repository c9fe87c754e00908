"""Gyre's official problems as workloads of Ramble; docs/building.md says how to use them.

The options are those of `gyre-study plan official-PROBLEM --size SIZE --cases`; a test compares them.
"""

from ramble.appkit import *

DRAWN = "--gen dist=histogram,file={inputs}/lengths/"
PROBLEMS = {
    "attention": {
        "program": "gyre-attention --cp {n_ranks}",
        "common": "--mask causal --schedule ring,all-to-all,group-cast --layout balanced",
        "tiny": DRAWN + "prolong64k.csv,tokens=2K,seed=42 --capacity 2K --heads 4 --kv-heads 2 --head-dim 64 --dtype f32",
        "small": DRAWN + "prolong64k.csv,tokens=64K,seed=42 --capacity 64K --heads 32 --kv-heads 8 --head-dim 128 --dtype bf16",
    },
    "log-probs": {
        "program": "gyre-logprobs --tp {n_ranks} --cp 1",
        "common": "--op logprob-entropy --method gyre",
        "tiny": DRAWN + "prolong64k.csv,tokens=1K,seed=42 --capacity 1K --vocab 16K --dtype f32",
        "small": DRAWN + "prolong64k.csv,tokens=16K,seed=42 --capacity 16K --vocab 128K --dtype bf16",
    },
    "packing": {
        "program": "gyre-pack",
        "common": "--capacity 64K --iters auto --algorithm balanced",
        "tiny": DRAWN + "prolong512k.csv,max=64K,count=20K,seed=42",
        "small": DRAWN + "prolong512k.csv,max=64K,count=1M,seed=42",
    },
    "pipeline": {
        "program": "gyre-pipeline --cp {n_ranks} --tp 1 --dp 1",
        "common": "--schedule ring --layout balanced --dtype f32",
        "tiny": "--input {inputs}/docs_tiny.h5 --model {inputs}/model_tiny.h5",
        "small": DRAWN + "prolong64k.csv,tokens=64K,seed=42 --model {inputs}/model.h5 --bin 16K",
    },
}
FIGURES = {  # metric of a FOM line: its unit
    "attention_rate": "TFLOP/s/rank",
    "average_attention_rate": "TFLOP/s/rank",
    "logits_rate": "GB/s/rank",
    "average_logits_rate": "GB/s/rank",
    "share_of_bandwidth": "of measured",
    "average_share_of_bandwidth": "of measured",
    "documents_per_s": "1/s",
    "utilisation": "of slots",
    "cost_imbalance": "max/mean",
    "tokens_per_s": "1/s",
    "tokens_per_s_per_rank": "1/s/rank",
    "share_of_limit": "of the limit",
    "bits_per_byte": "bit",
    "mean_entropy": "bit",
}


class Gyre(ExecutableApplication):
    """MPI mini-apps for the data path of long-context LLM training and scoring"""

    name = "gyre"
    tags("mpi", "gpu", "llm")

    software_spec("gyre", pkg_spec="gyre@main", package_manager="spack*")
    required_package("gyre", package_manager="spack*")

    for problem, options in PROBLEMS.items():
        executable(problem, "{gyre_path}/bin/" + options["program"] + " {options_{size}} {options} {more}", use_mpi=True)
        workload(problem, executables=[problem])
        for size in ("tiny", "small"):
            workload_variable(f"options_{size}", default=options[size], description=f"Options of {size}", workloads=[problem])
        workload_variable("options", default=options["common"], description="Options of all sizes", workloads=[problem])
    workload_variable("size", default="tiny", values=["tiny", "small"], description="Size", workloads=list(PROBLEMS))
    workload_variable("more", default="", description="More options, as --backend cuda", workloads=list(PROBLEMS))
    workload_variable("inputs", default="{gyre_path}/share/gyre/inputs", description="Inputs", workloads=list(PROBLEMS))

    for metric, unit in FIGURES.items():
        figure_of_merit(
            metric + "{tags}",
            fom_regex=rf"FOM \S+ {metric} (?P<value>\S+) {unit}(?P<tags>( \S+=.+)?)$",
            group_name="value",
            units=unit,
        )
    success_criteria("verified", mode="string", match=r"VERIFY PASSED ")
    success_criteria("reported", mode="string", match=r"RESULT ")
