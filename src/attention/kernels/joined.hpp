#pragma once
// Joins rectangles before they become entries of batches. Layouts and masks cut a document into
// chunks and regions. As entries, pieces that share queries or keys would need scratch rows of
// their own, and their results would have to be merged.

#include <span>
#include <vector>

#include "attention/rectangle.hpp"

namespace gyre {

/// Whether every query sees every key.
bool is_full(const Rectangle& r);

/// Joins full rectangles of the same queries whose keys follow one another, then those of the same
/// keys whose queries follow one another. The result is sorted by q_begin.
std::vector<Rectangle> joined(std::span<const Rectangle> rectangles);

/// Joins a full rectangle to the diagonal behind its keys, after cutting off the queries that are
/// not on the diagonal. Several diagonals behind the same keys are left as they are: each would
/// need scratch rows for these keys. The result is sorted by q_begin.
///
///     prefix-LM    p p p              p p p
///                  p p p        =>    p p p         full
///                  p p p d            d d d d
///                  p p p d d          d d d d d     causal, up to the last key
std::vector<Rectangle> joined_prefixes(std::span<const Rectangle> rectangles);

}  // namespace gyre
