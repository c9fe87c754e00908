"""Small models of each architecture that gyre-import --model reads, with weights made of a seed.

model_cases.json holds the log-probabilities that transformers computes for them in float64;
`python/test_transformers.py --record` writes it.
"""

import json
import pathlib
import zlib

import model_files
import numpy as np

VOCAB = 61
LENGTHS = (40, 1, 23)  # tokens of the documents
GOLDEN = pathlib.Path(__file__).with_name("model_cases.json")

USUAL = {
    "model_type": "llama", "vocab_size": VOCAB, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "intermediate_size": 48, "rope_theta": 1e4, "rms_norm_eps": 1e-6,
    "hidden_act": "silu", "max_position_embeddings": 64,
}  # fmt: skip
LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}  # fmt: skip
YARN = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
YARN_RAMP = {  # between pairs 1.4 and 3.4, which are rounded to 1 and 4
    "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "beta_fast": 0.5, "beta_slow": 0.05,
}  # fmt: skip
YARN_OF_ALL = {
    "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "beta_fast": 3.0, "beta_slow": 0.5,
    "mscale": 1.5, "mscale_all_dim": 0.5, "truncate": False, "rope_theta": 5e3,
}  # fmt: skip

RECURRENT = {
    "num_hidden_layers": 3, "full_attention_interval": 2, "rope_theta": None, "linear_num_key_heads": 2,
    "linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 12, "linear_conv_kernel_dim": 4,
}  # fmt: skip

GGUF = ("llama", "llama-linear", "llama-3", "llama-yarn", "llama-bias", "qwen2", "qwen3")  # cases in that format

OURS = ("attention_sinks", "final_logit_softcapping", "rotary_dim")  # keys of gyre/model that no config.json of these families has
# What transformers has in none of these families: compared with inputs/reference.py alone.
NUMPY_ONLY = {
    "partial": ({"rotary_dim": 8}, ("rotary_dim",)),
    "soft-cap": ({"final_logit_softcapping": 3.0}, ("final_logit_softcapping",)),
    "partial-linear": ({"rotary_dim": 6, "rope_scaling": {"type": "linear", "factor": 4.0}}, ("rotary_dim",)),
}
# name -> (keys that differ from USUAL; None: left out), (keys without which the scores must be others)
CASES = {
    "llama": ({}, ()),
    "llama-linear": ({"rope_scaling": {"type": "linear", "factor": 4.0}}, ("rope_scaling",)),
    "llama-3": ({"rope_scaling": LLAMA3, "tie_word_embeddings": True}, ("rope_scaling",)),
    "llama-yarn": ({"rope_scaling": YARN}, ("rope_scaling",)),
    "llama-yarn-ramp": ({"rope_scaling": YARN_RAMP}, ("rope_scaling",)),
    "llama-gelu": ({"hidden_act": "gelu"}, ("hidden_act",)),
    "llama-gelu-tanh": ({"hidden_act": "gelu_pytorch_tanh"}, ("hidden_act",)),
    "llama-sinks": ({"attention_sinks": True}, ("attention_sinks",)),
    "llama-bias": ({"attention_bias": True}, ("attention_bias",)),
    "qwen2": ({"model_type": "qwen2", "num_key_value_heads": 4, "rms_norm_eps": None}, ()),
    "qwen3": (
        {"model_type": "qwen3", "attention_bias": True, "rope_theta": None, "rms_norm_eps": 0.02}, ("attention_bias",),
    ),
    "smollm3": (
        {"model_type": "smollm3", "num_hidden_layers": 3, "no_rope_layer_interval": 2, "tie_word_embeddings": None,
         "rope_theta": None, "pad_token_id": 0},
        ("no_rope_layer_interval",),
    ),
    "mistral": ({"model_type": "mistral", "num_hidden_layers": 3, "sliding_window": 7}, ("sliding_window",)),
    "qwen2-window": (
        {"model_type": "qwen2", "use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1},
        ("max_window_layers",),
    ),
    "qwen3-layer-types": (
        {"model_type": "qwen3", "num_hidden_layers": 3, "use_sliding_window": True, "sliding_window": 9,
         "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
        ("layer_types",),
    ),
    "qwen3-next": (
        RECURRENT | {"model_type": "qwen3_next", "mlp_only_layers": [1], "decoder_sparse_step": 2, "num_experts": 8,
                     "partial_rotary_factor": 0.5},
        ("partial_rotary_factor",),
    ),
    "qwen3.5": (
        RECURRENT | {"model_type": "qwen3_5_text", "rms_norm_eps": 1e-5, "tie_word_embeddings": True,
                     "full_attention_interval": None, "attn_output_gate": True,
                     "layer_types": ["full_attention", "linear_attention", "linear_attention"],
                     "rope_parameters": {"rope_type": "default", "rope_theta": 100.0, "mrope_interleaved": True,
                                         "mrope_section": [1, 1, 0]}},
        ("rope_parameters",),
    ),
    "llama-yarn-parameters": ({"rope_parameters": YARN_OF_ALL, "rope_theta": None}, ("rope_parameters",)),
}


def config_of(case):
    """config.json of a case."""
    changes, _ = (CASES | NUMPY_ONLY)[case]
    return {key: value for key, value in (USUAL | changes).items() if value is not None}


def recurrent_layers(config):
    """Whether each layer is recurrent."""
    count, interval = config["num_hidden_layers"], config.get("full_attention_interval", 4)
    if config["model_type"] not in model_files.HYBRIDS:
        return [False] * count
    if "layer_types" in config:
        return [kind == "linear_attention" for kind in config["layer_types"]]
    return [(layer + 1) % interval != 0 for layer in range(count)]


def recurrent_shapes(config):
    """Shapes of what a recurrent layer has in place of attention."""
    hidden, heads, width = config["hidden_size"], config["linear_num_value_heads"], config["linear_conv_kernel_dim"]
    keys = config["linear_num_key_heads"] * config["linear_key_head_dim"]
    values = heads * config["linear_value_head_dim"]
    return {
        "wq": (hidden, keys), "wk": (hidden, keys), "wv": (hidden, values), "wz": (hidden, values), "wb": (hidden, heads),
        "wa": (hidden, heads), "conv_q": (width, keys), "conv_k": (width, keys), "conv_v": (width, values),
        "a_log": (heads,), "dt_bias": (heads,), "o_norm": (config["linear_value_head_dim"],), "wo": (values, hidden),
    }  # fmt: skip


def shapes(config):
    """Our name -> shape, [in, out]."""
    hidden, inner, dim = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    q, kv = config["num_attention_heads"] * dim, config["num_key_value_heads"] * dim
    family = config["model_type"]
    biases = config.get("attention_bias", False)
    is_hybrid = family in model_files.HYBRIDS
    of_layer = {
        "attn_norm": (hidden,), "wq": (hidden, q), "wk": (hidden, kv), "wv": (hidden, kv), "wo": (q, hidden),
        "mlp_norm": (hidden,), "w_gate": (hidden, inner), "w_up": (hidden, inner), "w_down": (inner, hidden),
    }  # fmt: skip
    if biases or family == "qwen2":
        of_layer |= {"bq": (q,), "bk": (kv,), "bv": (kv,)}
    if biases:
        of_layer["bo"] = (hidden,)
    if config.get("attention_sinks"):
        of_layer["sinks"] = (config["num_attention_heads"],)
    if family == "qwen3" or is_hybrid:
        of_layer |= {"q_norm": (dim,), "k_norm": (dim,)}
    found = {"embed": (VOCAB, hidden), "final_norm": (hidden,)}
    if not config.get("tie_word_embeddings", family == "smollm3"):
        found["head"] = (hidden, VOCAB)
    if is_hybrid:
        of_layer["wz"] = (hidden, q)
    for layer, is_recurrent in enumerate(recurrent_layers(config)):
        own = of_layer
        if is_recurrent:
            own = {name: of_layer[name] for name in ("attn_norm", "mlp_norm", "w_gate", "w_up", "w_down")}
            own |= recurrent_shapes(config)
        found |= {f"layers/{layer}/{name}": shape for name, shape in own.items()}
    return found


def weights_of(config):
    """Our name -> float32 array. RandomState's streams never change between versions of NumPy."""
    made = {}
    for name, shape in shapes(config).items():
        normal = np.random.RandomState(zlib.crc32(name.encode())).standard_normal(shape)
        if name.endswith("norm"):
            normal = 1 + 0.3 * normal
        elif len(shape) == 2 and name != "embed":
            normal *= 1.5 / np.sqrt(shape[0])
        made[name] = normal.astype(np.float32)
    return made


def gguf_of(config):
    """The model as GGUF: (tensors, keys)."""
    family, dim = config["model_type"], config["head_dim"]
    arrays = weights_of(config)
    keys = {
        "block_count": config["num_hidden_layers"], "embedding_length": config["hidden_size"],
        "feed_forward_length": config["intermediate_size"], "attention.head_count": config["num_attention_heads"],
        "attention.head_count_kv": config["num_key_value_heads"], "attention.key_length": dim,
        "attention.value_length": dim, "rope.freq_base": config.get("rope_theta", 1e4),
        "attention.layer_norm_rms_epsilon": config.get("rms_norm_eps", 1e-6), "vocab_size": VOCAB,
    }  # fmt: skip
    tensors = model_files.gguf_of(arrays, dim, family)
    scaling = config.get("rope_scaling", {})
    if scaling.get("rope_type") == "llama3":
        # As llama.cpp's conversion writes it: what each pair's frequency is divided by.
        wavelength = 2 * np.pi * config["rope_theta"] ** (np.arange(0, dim, 2) / dim)
        turns = scaling["original_max_position_embeddings"] / wavelength
        low, high, factor = (scaling[key] for key in ("low_freq_factor", "high_freq_factor", "factor"))
        share = np.clip((turns - low) / (high - low), 0, 1)
        divisors = 1 / (share + (1 - share) / factor)
        tensors["rope_freqs.weight"] = (0, divisors.shape, divisors.astype(np.float32).tobytes())
    elif scaling:
        keys |= {"rope.scaling.type": scaling["type"], "rope.scaling.factor": scaling["factor"]}
        if scaling["type"] == "yarn":
            keys["rope.scaling.original_context_length"] = scaling["original_max_position_embeddings"]
    return tensors, {"general.architecture": family} | {f"{family}.{key}": value for key, value in keys.items()}


def documents():
    """Tokens of each document."""
    random = np.random.RandomState(7)
    return [random.randint(0, VOCAB, length) for length in LENGTHS]


def golden():
    """Case -> log-probabilities of all predictions."""
    return {case: np.array(values) for case, values in json.loads(GOLDEN.read_text()).items()}
