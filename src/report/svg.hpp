#pragma once
// Building blocks of SVG pictures. Lengths are in pixels.

#include <string>

namespace gyre::svg {

/// The opening tag of a picture of this size, and its white background.
std::string begin(double width, double height);

/// The colour of a rank. Colour-blind readers can tell up to eight ranks apart, whose colours are
/// those of Okabe and Ito with a wine red and a grey. More ranks have colours of the map cividis:
/// dark ones for even ranks and light ones for odd ranks, so that neighbours differ in print too.
std::string color(int rank, int cp);

/// A light tint, the background of a text, for a place of a list. The first eight differ as the
/// colours of eight ranks do.
std::string tint(int place);

/// The `anchor` of the text ("start", "middle" or "end") is at x. `s` must have no & or <.
std::string text(double x, double y, int size, const std::string& anchor, const std::string& s);

std::string rect(double x, double y, double width, double height, const std::string& fill,
                 double opacity = 1);

}  // namespace gyre::svg
