#pragma once
// Staircases of full rectangles, as block-causal masks have them. The steps attend adjacent queries
// to keys with a common begin, and each step sees more keys than the one before. As entries of one
// batch the steps would share keys, and a library would need scratch rows for all keys of each:
// O(steps) times the sequence. Halving gives O(log steps) layers in which rectangles of a staircase
// share neither queries nor keys, and in which equal steps give rectangles of equal sizes:
//
//     keys     0 1 2 3        layer    queries x keys
//     step 0   a              a        each step x the keys that the step before does not see
//     step 1   b a            b        1 x 0, 3 x 2
//     step 2   c c a          c        2-3 x 0-1
//     step 3   c c b a
//
// Keys before the first step's own, which all steps see, are one more layer.

#include <span>
#include <vector>

#include "attention/rectangle.hpp"

namespace gyre {

/// Splits `rectangles`, sorted by q_begin, into layers with the same visible pairs. The first layer
/// has all rectangles outside staircases, after joined_prefixes, and the pieces of single steps of
/// every staircase of at least `least_steps` steps. Without staircases it is the only layer.
std::vector<std::vector<Rectangle>> staircase_layers(std::span<const Rectangle> rectangles);
inline constexpr int least_steps = 4;

}  // namespace gyre
