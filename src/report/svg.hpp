#pragma once
// Pieces of SVG that all pictures are made of. Lengths are in pixels.

#include <string>

namespace gyre::svg {

/// The opening tag of a picture of this size, and its white ground.
std::string begin(double width, double height);

/// The colour of a rank: evenly spaced hues; neighbours in rank differ in lightness as well, for
/// print and for eyes that see few hues.
std::string color(int rank, int cp);

/// `anchor`: start, middle or end of the text is at x. `s` stands as it is, without & and <.
std::string text(double x, double y, int size, const std::string& anchor, const std::string& s);

std::string rect(double x, double y, double width, double height, const std::string& fill,
                 double opacity = 1);

}  // namespace gyre::svg
