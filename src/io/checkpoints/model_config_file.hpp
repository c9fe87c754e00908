#pragma once
// Reads the shape of a decoder without its weights.

#include <string>
#include <vector>

#include "comm/communicator.hpp"
#include "core/model_config.hpp"

namespace gyre {

/// Parses a config.json, see read_model_config(); `path` names it in errors.
ModelConfig parse_model_config(const std::string& path, const std::string& text);

/// The contents of the config.json of a checkpoint.
struct CheckpointConfig {
  ModelConfig config;
  int64_t longest_text = 0;     ///< 'max_position_embeddings', or 0
  bool norms_less_one = false;  ///< see Checkpoint
};

/// Parses the config.json of a checkpoint, whose weights are to be used: every key must be one that
/// is read, be known to change nothing, or be one of `ignored_keys` ("KEY" or "OBJECT.KEY"); any
/// other is a usage error that names it, as is an ignored key that is read or not there.
CheckpointConfig parse_checkpoint_config(const std::string& path, const std::string& text,
                                         const std::vector<std::string>& ignored_keys);

/// Reads the shape from a gyre/model file or, if the name ends in .json, from a config.json of
/// Hugging Face's transformers. A config.json must describe dense layers of a family that
/// find_family() knows; its vocab_padded is vocab_size rounded up to a multiple of 128, as Megatron
/// pads it.
/// Throws a usage error that names the file and the key of what is missing, wrong or unsupported
/// (experts, latent attention). Collective.
ModelConfig read_model_config(Communicator& comm, const std::string& path);

}  // namespace gyre
