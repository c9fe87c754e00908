#pragma once
// Document lengths drawn from a distribution: --gen.

#include <cstdint>
#include <string>
#include <vector>

namespace gyre {

/// The help of --gen: distributions and their keys.
std::string length_help();

/// The document lengths of the first bin of synthetic documents (packing/lengths.hpp) packed into
/// bins of `capacity` slots. `origin` gets the spec and packer that reproduce them.
std::vector<int64_t> generated_lengths(const std::string& spec, int64_t capacity,
                                       std::string& origin);

}  // namespace gyre
