#include "apps/pack/encoder_gradient.hpp"

#include <algorithm>

#include "sharding/encoder_work.hpp"

namespace gyre {
namespace {

constexpr std::pair<const char*, GatherGradient> conventions[] = {
    {"encoder gradient, sum", GatherGradient::sum},
    {"encoder gradient, split", GatherGradient::split},
    {"encoder gradient, none", GatherGradient::none},
};

/// The gradient on `rank`: small integers, so that sums over ranks are exact.
float gradient(int rank, size_t item, size_t element) {
  return static_cast<float>((rank + 1) * static_cast<int>((item * 31 + element) % 97 + 1));
}

/// The gradient that the encoder of `rank` gets by the definition of the convention.
float expected_gradient(GatherGradient convention, int rank, int ranks, size_t item,
                        size_t element) {
  if (convention == GatherGradient::none) return 0;
  if (convention == GatherGradient::split) return gradient(rank, item, element);
  float sum = 0;
  for (int r = 0; r < ranks; ++r) sum += gradient(r, item, element);
  return sum;
}

}  // namespace

void check_encoder_gradients(const std::vector<std::vector<float>>& frames, Communicator& world,
                             Verification& checks) {
  std::vector<std::vector<float>> mine(frames.size());
  for (size_t i = 0; i < frames.size(); ++i)
    for (size_t e = 0; e < frames[i].size(); ++e) mine[i].push_back(gradient(world.rank(), i, e));
  // Blocks have equally many items; the last ones may be shorter.
  const size_t block =
      (frames.size() + static_cast<size_t>(world.size()) - 1) / static_cast<size_t>(world.size());
  const size_t first = std::min(frames.size(), static_cast<size_t>(world.rank()) * block);
  const size_t last = std::min(frames.size(), first + block);
  Verification local(checks.tolerance_scale());
  for (const auto& [name, convention] : conventions) {
    Check& check = local.check(name, 0);
    if (first == last) check.add_nothing();
    const auto encoder = encoder_gradient(world, mine, convention);
    std::vector<std::vector<float>> expected;
    for (size_t i = first; i < last; ++i) {
      std::vector<float>& item = expected.emplace_back();
      for (size_t e = 0; e < frames[i].size(); ++e)
        item.push_back(expected_gradient(convention, world.rank(), world.size(), i, e));
    }
    check.add(encoder.size(), expected.size(), [] { return "items"; });
    for (size_t i = 0; i < std::min(encoder.size(), expected.size()); ++i)
      check.add_all(encoder[i], expected[i], fmt::format("audio {}", first + i));
  }
  local.merge_over(world);
  checks.merge(local);
}

}  // namespace gyre
