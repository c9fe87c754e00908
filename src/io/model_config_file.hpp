#pragma once
// Reads the shape of a decoder without its weights.

#include <string>

#include "comm/communicator.hpp"
#include "core/model_config.hpp"

namespace gyre {

/// Parses a config.json, see read_model_config(); `path` names it in errors.
ModelConfig parse_model_config(const std::string& path, const std::string& text);

/// Reads the shape from a gyre/model file or, if the name ends in .json, from a config.json of
/// Hugging Face's transformers: dense layers like those of LlamaForCausalLM, full causal attention.
/// For the latter, vocab_padded is vocab_size rounded up to a multiple of 128, as Megatron pads it.
/// Throws a usage error that names the file and the key of what is missing, wrong or unsupported
/// (experts, latent or windowed attention). Collective.
ModelConfig read_model_config(Communicator& comm, const std::string& path);

}  // namespace gyre
