#include "core/checksum.hpp"

#define XXH_INLINE_ALL  // NOLINT(readability-identifier-naming): the library names it
#include <xxhash.h>

namespace gyre {
namespace {

static_assert(sizeof(XXH3_state_t) == 576 && alignof(XXH3_state_t) == 64);

XXH3_state_t* library(std::array<std::byte, 576>& state) {
  return reinterpret_cast<XXH3_state_t*>(state.data());
}
const XXH3_state_t* library(const std::array<std::byte, 576>& state) {
  return reinterpret_cast<const XXH3_state_t*>(state.data());
}

}  // namespace

Checksum::Checksum() {
  XXH3_64bits_reset(library(state_));
}
void Checksum::add(std::span<const std::byte> slice) {
  XXH3_64bits_update(library(state_), slice.data(), slice.size());
}
uint64_t Checksum::value() const {
  return XXH3_64bits_digest(library(state_));
}

uint64_t checksum_of(std::span<const std::byte> data) {
  return XXH3_64bits(data.data(), data.size());
}

}  // namespace gyre
