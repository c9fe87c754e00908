#pragma once
// What is fuzzed: a reader of files or of texts, and the cases that it is given.

#include <cstdint>
#include <functional>
#include <random>
#include <string>
#include <vector>

#include "comm/communicator.hpp"

namespace gyre::fuzz {

using Random = std::mt19937_64;

/// Of what was read from datasets. The first is that of all of it; the others are those of files
/// that lack an optional part, and are right as well.
using Digests = std::vector<uint64_t>;

/// A reader. It gets one case, the path of a file or a text (then without a communicator), returns
/// when it accepts the case, and throws when it refuses it.
struct Target {
  std::string name;
  bool file = true;
  /// A mutated file that is accepted must have a digest of a seed.
  std::function<Digests(Communicator* comm, const std::string& input)> read;
  /// Unmutated files or texts.
  std::vector<std::string> seeds;
  /// Makes a case of a text target; empty: bytes of a seed are changed.
  std::function<std::string(Random& random)> draw = {};
  /// Reads back what its own program has just written, which it checks as it checks itself.
  bool own = false;
};

/// Readers of files. `folder` holds the seeds that programs have written, `inputs` the others.
std::vector<Target> file_targets(const std::string& inputs, const std::string& folder);

/// Importers of other programs' models. `seeds` holds model.safetensors with config.json and an
/// index, and model.gguf, the last tensor of whose header is output_norm.weight.
std::vector<Target> checkpoint_targets(const std::string& seeds);

/// Readers of specifications, command lines and configuration files. `folder` is for the latter.
std::vector<Target> text_targets(const std::string& folder);

/// A seed with one to eight changes. In HDF5 files most of them hit metadata.
std::string mutate_bytes(const std::string& seed, Random& random);
std::string mutate_text(const std::string& seed, Random& random);

/// FNV-1a.
uint64_t hash_bytes(const void* data, size_t bytes, uint64_t hash = 0xcbf29ce484222325);

}  // namespace gyre::fuzz
