#pragma once
// Building blocks of SVG pictures. Lengths are in pixels.

#include <string>

namespace gyre::svg {

/// The opening tag of a picture of this size, and its white background.
std::string begin(double width, double height);

/// The colour of a rank. Hues are evenly spaced; consecutive ranks differ in lightness as well, for
/// print and for colour-blind readers.
std::string color(int rank, int cp);

/// The `anchor` of the text ("start", "middle" or "end") is at x. `s` must have no & or <.
std::string text(double x, double y, int size, const std::string& anchor, const std::string& s);

std::string rect(double x, double y, double width, double height, const std::string& fill,
                 double opacity = 1);

}  // namespace gyre::svg
