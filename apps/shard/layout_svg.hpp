#pragma once
// A picture of a layout: the owner of each slot, the rank that computes each part of the attention
// mask, and the ranks whose keys each rank needs.

#include <string>
#include <vector>

#include "sharding/layout.hpp"

namespace gyre {

/// A layout of a stream and the boundaries that it was made for.
struct LayoutPicture {
  const Layout& layout;
  SegmentBounds bounds;
};

/// An SVG with one row per layout:
///   - a bar of the stream, coloured by owner; padding is pale, ticks are segment boundaries
///   - the causal mask with its documents as triangles; a query's row has the colour of its owner
///   - bars of the pairs of each rank against the mean
///   - a matrix: row r, column s is the share of rank s's tokens whose keys rank r needs
/// Long streams are sampled at some 400 slots.
std::string layout_svg(const std::string& title, const std::vector<LayoutPicture>& pictures);

}  // namespace gyre
