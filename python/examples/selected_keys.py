import numpy as np

import gyre

rng = np.random.default_rng(1)
q, k, v = (rng.normal(size=(48, heads, 16)).astype("f4") for heads in (4, 1, 1))
scores = gyre.reference.index_scores(rng.normal(size=(48, 2, 8)), rng.normal(size=(48, 8)), np.ones((48, 2)))
inputs = {"q": q, "k": k, "v": v, "mask": "selected", "selected_keys": gyre.reference.selected_keys(scores, 6)}
gyre.write_attention("selected.h5", **inputs, reference=gyre.reference.attention(**inputs))
