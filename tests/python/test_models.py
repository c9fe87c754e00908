#!/usr/bin/env python3
"""Every architecture that gyre-import --model reads: imported, scored on several grids, and compared with transformers.

Log-probabilities of transformers come from tests/support/model_cases.json. Usage: test_models.py SOURCE_DIR BUILD_DIR
"""

import os
import pathlib
import subprocess
import sys
import tempfile

import h5py
import numpy as np

SOURCE, BUILD = map(pathlib.Path, sys.argv[1:3])
sys.dont_write_bytecode = True
for folder in ("python", "inputs", "tests/support"):
    sys.path.insert(0, str(SOURCE / folder))
import gyre  # noqa: E402
import model_cases  # noqa: E402
import model_files  # noqa: E402
import reference  # noqa: E402
from gyre.arrays import from_bfloat16_bits  # noqa: E402

GRIDS = ({}, {"cp": 2}, {"tp": 2})
# transformers computes angles in float32: at position 40 they are wrong by 2e-6.
TOLERANCE = 1e-4
MATTERS = 1e-2  # what leaving out a feature changes at least


def run(program, *arguments, ranks=1):
    launch = [os.environ.get("MPIEXEC", "mpiexec.mpich"), "-n", str(ranks)] if ranks > 1 else []
    done = subprocess.run(
        [*launch, BUILD / "apps" / program, *map(str, arguments)], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, (program, arguments, done.stdout, done.stderr)
    return done.stdout


def import_model(scratch, source):
    model = scratch / f"{source.name}.h5"
    run("gyre-import", "-o", model, "--model", source)
    return model


def make_model(scratch, name, config, arrays):
    """The model file of a case: imported, and what no config.json asks for is added."""
    ours = {key: config[key] for key in model_cases.OURS if key in config}
    sinks = {n: a for n, a in arrays.items() if n.endswith("/sinks")}
    theirs = {key: value for key, value in config.items() if key not in ours}
    tensors = model_files.safetensors_of({n: a for n, a in arrays.items() if n not in sinks}, config=config)
    model = import_model(scratch, model_files.write_folder(scratch / name, theirs, tensors))
    if ours:
        model_files.add_to_model(model, ours, sinks)
    return model


def scores(scratch, model, *more, **grid):
    """Log-probabilities of gyre-pipeline; `more` of its options."""
    output = scratch / "scores.h5"
    sizes = [part for name, size in grid.items() for part in (f"--{name}", size)]
    ranks = int(np.prod([1, *grid.values()]))
    options = ["-n", 1, "-w", 0, "-o", output, *sizes, *more]
    text = run("gyre-pipeline", "--input", scratch / "docs.h5", "--model", model, *options, ranks=ranks)
    assert "VERIFY PASSED" in text, text
    with h5py.File(output) as file:
        return file["results/logprob"][...].astype(np.float64)


def by_numpy(model):
    """Log-probabilities of the NumPy reference."""
    loaded = reference.Model(model)
    return np.concatenate([reference.score(loaded, document)[0] for document in model_cases.documents()])


def expect_close(found, wanted, *where):
    worst = np.abs(found - wanted).max()
    assert found.shape == wanted.shape and worst < TOLERANCE, (*where, worst)


def test_models(scratch):
    golden = model_cases.golden()
    assert set(golden) == set(model_cases.CASES)
    gyre.write_documents(scratch / "docs.h5", model_cases.documents(), vocab_size=model_cases.VOCAB)
    for case, (_, features) in (model_cases.CASES | model_cases.NUMPY_ONLY).items():
        config = model_cases.config_of(case)
        arrays = model_cases.weights_of(config)
        model = make_model(scratch, case, config, arrays)
        wanted = golden.get(case, by_numpy(model))
        expect_close(by_numpy(model), wanted, case, "NumPy")
        for grid in GRIDS:
            expect_close(scores(scratch, model, **grid), wanted, case, grid)
        if case == "mistral":  # every layer has a window
            halo = scores(scratch, model, "--schedule", "halo", "--layout", "contiguous", cp=2)
            expect_close(halo, wanted, case, "halo")
        if case in model_cases.GGUF:
            path = scratch / f"{case}.gguf"
            model_files.write_gguf(path, *model_cases.gguf_of(config))
            expect_close(scores(scratch, import_model(scratch, path)), wanted, case, "GGUF")
        for feature in features:
            without = {key: value for key, value in config.items() if key != feature}
            fewer = {n: a for n, a in arrays.items() if n in model_cases.shapes(without)}
            changed = make_model(scratch, f"{case}-without-{feature}", without, fewer)
            worst = np.abs(by_numpy(changed) - wanted).max()
            assert worst > MATTERS, (case, feature, worst)
        print(f"{case}: ok")


def test_types_of_weights(scratch):
    """Weights of 16 bits give the scores of float32 weights of the same values, bit by bit."""
    gyre.write_documents(scratch / "docs.h5", model_cases.documents(), vocab_size=model_cases.VOCAB)
    config = model_cases.config_of("llama")
    arrays = model_cases.weights_of(config)
    for dtype in ("F16", "BF16"):
        words = {name: model_files.encoded(array, dtype) for name, array in arrays.items()}
        widen = from_bfloat16_bits if dtype == "BF16" else lambda w: w.view(np.float16).astype(np.float32)
        values = {name: widen(w) for name, w in words.items()}
        stored = [
            import_model(scratch, model_files.write_folder(scratch / f"{dtype}-as-{kind}", config, tensors))
            for kind, tensors in (
                (dtype, model_files.safetensors_of(arrays, dtype)),
                ("F32", model_files.safetensors_of(values)),
            )
        ]
        narrow, wide = stored
        assert "same" in run("gyre-compare", narrow, wide)
        for grid in GRIDS:
            np.testing.assert_array_equal(scores(scratch, narrow, **grid), scores(scratch, wide, **grid))
        np.testing.assert_array_equal(by_numpy(narrow), by_numpy(wide))
        print(f"{dtype}: ok")


if __name__ == "__main__":
    for test in (test_models, test_types_of_weights):
        with tempfile.TemporaryDirectory() as folder:
            test(pathlib.Path(folder))
