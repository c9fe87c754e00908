#!/usr/bin/env python3
"""Models that transformers writes, scored here and there.

For each case of tests/support/model_cases.py: transformers makes the model and writes it (save_pretrained), gyre-import
reads that folder, gyre-pipeline scores. Usage: test_transformers.py SOURCE_DIR BUILD_DIR [--record]; --record writes
tests/support/model_cases.json instead. Needs torch, transformers, h5py and NumPy; without them it is skipped.
"""

import json
import os
import pathlib
import subprocess
import sys
import tempfile
from unittest import mock

try:
    import torch
    import transformers
    from transformers.models.gpt_oss import modeling_gpt_oss
    from transformers.models.llama import modeling_llama
    from transformers.models.qwen3_5 import modeling_qwen3_5
    from transformers.models.qwen3_next import modeling_qwen3_next
except ImportError as error:
    print(f"skipped: {error}")
    sys.exit(77)
import numpy as np

sys.dont_write_bytecode = True
sys.path.insert(0, str(pathlib.Path(__file__).parent))
sys.path.insert(0, str(pathlib.Path(sys.argv[1]) / "tests" / "support"))
import model_cases  # noqa: E402
import model_files  # noqa: E402


def model_of(folder):
    """The model of transformers, in float64."""
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).double()


def add_sinks(model, arrays):
    """Gives a Llama the attention of gpt-oss, with these sinks."""
    modeling_llama.eager_attention_forward = modeling_gpt_oss.eager_attention_forward
    model.set_attn_implementation("eager")
    for layer, block in enumerate(model.model.layers):
        block.self_attn.sinks = torch.from_numpy(arrays[f"layers/{layer}/sinks"]).double()


class TorchInDouble:
    """torch, where float32 means float64."""

    def __getattr__(self, name):
        return getattr(torch, "float64" if name == "float32" else name)


# Recurrent layers would compute in float32 whatever the type of the model.
@mock.patch.object(modeling_qwen3_5, "torch", TorchInDouble())
@mock.patch.object(modeling_qwen3_next, "torch", TorchInDouble())
@mock.patch.object(torch.Tensor, "float", torch.Tensor.double)
@torch.no_grad()
def scores(model):
    """Log-probabilities of all predictions, in float64."""
    found = []
    for document in model_cases.documents():
        tokens = torch.from_numpy(document.astype(np.int64))[None]
        logits = model(tokens).logits[0, :-1]
        logprob = torch.log_softmax(logits, -1).gather(1, tokens[0, 1:, None])[:, 0]
        found.append(logprob.numpy())
    return np.concatenate(found)


def folder_of(scratch, case):
    """The case as a folder with a hand-written config.json, without sinks."""
    config = model_cases.config_of(case)
    arrays = {n: a for n, a in model_cases.weights_of(config).items() if not n.endswith("/sinks")}
    theirs = {key: value for key, value in config.items() if key not in model_cases.OURS}
    return model_files.write_folder(scratch / case, theirs, model_files.safetensors_of(arrays, config=config))


def case_of(scratch, case):
    """The model of a case."""
    model, config = model_of(folder_of(scratch, case)), model_cases.config_of(case)
    if "attention_sinks" in config:
        add_sinks(model, model_cases.weights_of(config))
    return model


def record():
    with tempfile.TemporaryDirectory() as scratch:
        found = {case: scores(case_of(pathlib.Path(scratch), case)) for case in model_cases.CASES}
    lines = (f'"{case}": {json.dumps([round(x, 7) for x in values.tolist()])}' for case, values in found.items())
    model_cases.GOLDEN.write_text("{\n" + ",\n".join(lines) + "\n}\n")


def test_what_transformers_writes(scratch):
    import test_models as ours

    ours.gyre.write_documents(scratch / "docs.h5", model_cases.documents(), vocab_size=model_cases.VOCAB)
    for case in model_cases.CASES:
        if not set(model_cases.OURS).isdisjoint(model_cases.config_of(case)):
            continue  # no config.json can say it
        model = case_of(scratch, case)
        written = scratch / f"{case}-written"
        model.float().save_pretrained(written)
        imported = ours.import_model(scratch, written)
        wanted = scores(model_of(written))
        worst = max(np.abs(ours.scores(scratch, imported, **grid) - wanted).max() for grid in ours.GRIDS)
        assert worst < ours.TOLERANCE, (case, worst)
        print(f"{case}: differs by {worst:.1e} at most")


def test_the_table_of_grids(scratch):
    import test_models as ours

    folder = folder_of(scratch, "llama-3")
    ours.gyre.write_documents(scratch / "docs.h5", model_cases.documents(), vocab_size=model_cases.VOCAB)
    script = pathlib.Path(sys.argv[1]) / "bench" / "model_vs_transformers.py"
    mpiexec = os.environ.get("MPIEXEC", "mpiexec.mpich")
    arguments = [folder, ours.import_model(scratch, folder), scratch / "docs.h5", "--build", sys.argv[2], "--mpiexec", mpiexec]
    done = subprocess.run(
        [sys.executable, script, *arguments, "--grids", "cp=2", "tp=2", "--dtypes", "f32"], capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert sum(line.startswith("ours") for line in done.stdout.splitlines()) == 2, done.stdout


if __name__ == "__main__":
    if "--record" in sys.argv:
        record()
    else:
        for test in (test_what_transformers_writes, test_the_table_of_grids):
            with tempfile.TemporaryDirectory() as folder:
                test(pathlib.Path(folder))
