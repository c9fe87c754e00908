#include "apps/common/generated_lengths.hpp"

#include <fmt/format.h>

#include "apps/common/packed_streams.hpp"
#include "core/error.hpp"
#include "packing/lengths.hpp"

namespace gyre {

std::string length_help() {
  std::string text = "Draw lengths instead: dist=NAME,count=N,seed=N and, of";
  for (const LengthDistribution& d : length_distributions())
    text += fmt::format(" {}: {};", d.name, fmt::join(d.keys, ","));
  text.back() = '.';
  return text;
}

std::vector<int64_t> generated_lengths(const std::string& spec, int64_t capacity,
                                       std::string& origin) {
  PackedHeader header;
  origin = generate_streams(spec, "first-fit-shuffle", capacity, 1, 0, header, nullptr);
  std::vector<int64_t> lengths;
  if (header.bin_count() == 0) throw_usage("--gen {}: there is no document", spec);
  const auto cu_seqlens = header.cu_seqlens(0);
  for (size_t i = 0; i + 1 < cu_seqlens.size(); ++i)
    lengths.push_back(cu_seqlens[i + 1] - cu_seqlens[i]);
  return lengths;
}

}  // namespace gyre
