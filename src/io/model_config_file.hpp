#pragma once
// The shape of a decoder without its weights.

#include <string>

#include "comm/communicator.hpp"
#include "core/model_config.hpp"

namespace gyre {

/// A config.json, see read_model_config(); `path` is for errors.
ModelConfig parse_model_config(const std::string& path, const std::string& text);

/// Of a gyre/model file, or, where the name ends in .json, of a config.json of Hugging Face's
/// transformers: dense layers of LlamaForCausalLM's kind, full causal attention. vocab_padded is
/// then vocab_size rounded up to a multiple of 128, as Megatron pads it. Throws a usage error that
/// names the file and the key for what is missing, wrong, or of another kind (experts, latent or
/// windowed attention). Collective.
ModelConfig read_model_config(Communicator& comm, const std::string& path);

}  // namespace gyre
