import numpy as np

import gyre

rng = np.random.default_rng(1)
inputs = {
    "logits": rng.normal(0, 4, (32, 1000)).astype(np.float32),  # or a tensor, of bfloat16 too
    "targets": rng.integers(0, 1000, 32),
    "offsets": [0, 20, 32],  # two sequences
    "temperature": 0.7,
}
expected = gyre.reference.logprobs(**inputs)  # every array that these inputs define, in float64
mine = {"logprob": expected["logprob"].astype(np.float32)}  # in place of your kernel's
gyre.assert_close(mine, expected, common=True, rtol=1e-6)
gyre.write_logprobs("mine.h5", **inputs, reference=mine)  # gyre-logprobs --input mine.h5
