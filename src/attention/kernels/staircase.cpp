#include "attention/kernels/staircase.hpp"

#include <algorithm>
#include <bit>
#include <map>
#include <utility>

namespace gyre {
namespace {

int64_t queries_end(const Rectangle& r) {
  return r.q_begin + r.q_length;
}
int64_t keys_end(const Rectangle& r) {
  return r.k_begin + r.k_length;
}

/// Whether the mask is causal, without a window, and hides no key in front of the rectangle.
bool has_diagonal(const Rectangle& r) {
  const Mask& m = r.mask;
  return m.causal && m.window == 0 && m.q_stride == m.k_stride && m.end_key(0) >= 0 &&
         r.q_length > 0 && r.k_length > 0;
}

/// Joins a full rectangle and one with a diagonal, whose keys follow those of the full one.
Rectangle joined(const Rectangle& full, const Rectangle& diagonal) {
  Rectangle both = diagonal;
  both.k_begin = full.k_begin;
  both.k_length += full.k_length;
  both.mask.offset += full.k_length * both.mask.k_stride;
  return both;
}

class Layers {
 public:
  /// Adds the pairs of `steps` with keys from `begin` on.
  void split(std::span<const Rectangle> steps, int64_t begin) {
    const Rectangle& top = steps.front();
    if (steps.size() == 1) {
      steps_.push_back({top.q_begin, top.q_length, begin, keys_end(top) - begin, {}});
      return;
    }
    // The first part has a power of two of steps, so that rectangles of a level have equal sizes.
    const size_t first = std::bit_floor(steps.size() - 1);
    const int64_t middle = keys_end(steps[first - 1]), row = steps[first].q_begin;
    split(steps.first(first), begin);
    add(first, {row, queries_end(steps.back()) - row, begin, middle - begin, {}});
    split(steps.subspan(first), middle);
  }

  /// The layers, the first of which also has `others`.
  std::vector<std::vector<Rectangle>> with(std::vector<Rectangle> others) && {
    others.insert(others.end(), steps_.begin(), steps_.end());
    std::vector<std::vector<Rectangle>> layers = {std::move(others)};
    for (auto& [level, rectangles] : levels_) layers.push_back(std::move(rectangles));
    return layers;
  }

 private:
  /// Rectangles of other sizes than the first of their level are a layer of their own.
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
  return !steps.empty() && queries_end(steps.back()) == r.q_begin &&
         steps.back().k_length < r.k_length;
}

}  // namespace

bool is_full(const Rectangle& r) {
  return r.mask.begin_key(r.q_length - 1) <= 0 && r.mask.end_key(0) >= r.k_length;
}

std::vector<Rectangle> joined_keys(std::span<const Rectangle> rectangles) {
  std::vector<Rectangle> result;
  std::map<std::pair<int64_t, int64_t>, Rectangle> open;  // full ones, by their queries
  for (const Rectangle& r : rectangles) {
    const auto before = open.find({r.q_begin, r.q_length});
    const bool follows = before != open.end() && keys_end(before->second) == r.k_begin;
    const bool full = r.q_length > 0 && r.k_length > 0 && is_full(r);
    const Rectangle without_mask = {r.q_begin, r.q_length, r.k_begin, r.k_length, {}};
    if (full && follows) {
      before->second.k_length += r.k_length;
    } else if (full && before != open.end()) {
      result.push_back(std::exchange(before->second, without_mask));
    } else if (full) {
      open[{r.q_begin, r.q_length}] = without_mask;
    } else if (follows && has_diagonal(r)) {
      result.push_back(joined(before->second, r));
      open.erase(before);
    } else {
      result.push_back(r);
    }
  }
  for (const auto& [queries, r] : open) result.push_back(r);
  return result;
}

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
      layers.split(staircase.steps, staircase.steps.front().k_begin);
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
  return std::move(layers).with(std::move(others));
}

}  // namespace gyre
