#pragma once
// Building blocks of SVG pictures. Lengths are in pixels.

#include <string>

namespace gyre::svg {

/// The opening tag of a picture of this size, and its white background.
std::string begin(double width, double height);

/// The colour of a rank, which colour-blind readers tell from the others, and print does: up to
/// eight ranks have the palette of Okabe and Ito, with a wine red and a grey, more ranks that of
/// cividis. Ranks of even numbers are dark, the others light.
std::string color(int rank, int cp);

/// A light tint for the background of text; eight places of a list differ, as the colours of ranks.
std::string tint(int place);

/// The `anchor` of the text ("start", "middle" or "end") is at x. `s` must have no & or <.
std::string text(double x, double y, int size, const std::string& anchor, const std::string& s);

std::string rect(double x, double y, double width, double height, const std::string& fill,
                 double opacity = 1);

}  // namespace gyre::svg
