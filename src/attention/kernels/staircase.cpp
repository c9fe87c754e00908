#include "attention/kernels/staircase.hpp"

#include <algorithm>
#include <bit>
#include <map>
#include <utility>

#include "attention/kernels/joined.hpp"

namespace gyre {
namespace {

class Layers {
 public:
  /// Adds a staircase. Where the first step sees more keys than the second adds, what all steps see
  /// of these is a rectangle of its own, so that the steps are alike.
  void add(std::span<const Rectangle> steps) {
    const Rectangle& first = steps.front();
    const int64_t common = 2 * first.k_length - steps[1].k_length;
    if (common > 0)
      add(0, {first.q_begin, steps.back().q_end() - first.q_begin, first.k_begin, common, {}});
    split(steps, first.k_begin + std::max<int64_t>(0, common));
  }

  /// The layers, the first of which also has `others`.
  std::vector<std::vector<Rectangle>> with(std::vector<Rectangle> others) && {
    others.insert(others.end(), steps_.begin(), steps_.end());
    std::vector<std::vector<Rectangle>> layers = {std::move(others)};
    for (auto& [level, rectangles] : levels_) layers.push_back(std::move(rectangles));
    return layers;
  }

 private:
  /// Adds the pairs of `steps` with keys from `begin` on.
  void split(std::span<const Rectangle> steps, int64_t begin) {
    const Rectangle& top = steps.front();
    if (steps.size() == 1) {
      steps_.push_back({top.q_begin, top.q_length, begin, top.k_end() - begin, {}});
      return;
    }
    // The first part has a power of two of steps, so that rectangles of a level have equal sizes.
    const size_t first = std::bit_floor(steps.size() - 1);
    const int64_t middle = steps[first - 1].k_end(), row = steps[first].q_begin;
    split(steps.first(first), begin);
    add(first, {row, steps.back().q_end() - row, begin, middle - begin, {}});
    split(steps.subspan(first), middle);
  }

  /// Level 0: what all steps see. Others than the first of their level in size are a layer of their
  /// own.
  void add(size_t level, const Rectangle& r) {
    const std::vector<Rectangle>& like = levels_[{level, false}];
    const bool differs = !like.empty() && (like.front().q_length != r.q_length ||
                                           like.front().k_length != r.k_length);
    levels_[{level, differs}].push_back(r);
  }

  std::vector<Rectangle> steps_;
  std::map<std::pair<size_t, bool>, std::vector<Rectangle>> levels_;
};

bool continues(const std::vector<Rectangle>& steps, const Rectangle& r) {
  return !steps.empty() && steps.back().q_end() == r.q_begin && steps.back().k_length < r.k_length;
}

}  // namespace

std::vector<std::vector<Rectangle>> staircase_layers(std::span<const Rectangle> rectangles) {
  // Staircases that may go on, by their first key. `places`: indices of the steps in `rectangles`.
  struct Open {
    std::vector<Rectangle> steps;
    std::vector<size_t> places;
  };
  std::map<int64_t, Open> open;
  std::vector<bool> split(rectangles.size(), false);
  Layers layers;
  const auto close = [&](Open& staircase) {
    if (std::ssize(staircase.steps) >= least_steps) {
      layers.add(staircase.steps);
      for (const size_t place : staircase.places) split[place] = true;
    }
    staircase = {};
  };
  for (size_t i = 0; i < rectangles.size(); ++i) {
    const Rectangle& r = rectangles[i];
    if (r.q_length <= 0 || r.k_length <= 0 || !is_full(r)) continue;
    Open& staircase = open[r.k_begin];
    if (!continues(staircase.steps, r)) close(staircase);
    staircase.steps.push_back(r);
    staircase.places.push_back(i);
  }
  for (auto& [begin, staircase] : open) close(staircase);
  std::vector<Rectangle> others;
  for (size_t i = 0; i < rectangles.size(); ++i)
    if (!split[i]) others.push_back(rectangles[i]);
  return std::move(layers).with(joined_prefixes(others));
}

}  // namespace gyre
