#pragma once
// Which rows of an array have been written.

#include <cstdint>
#include <map>
#include <span>

#include "attention/rectangle.hpp"

namespace gyre {

class RowSet {
 public:
  /// Adds rows [begin, end); returns how many of them were in it before. O(log runs), amortised.
  int64_t add(int64_t begin, int64_t end);
  /// Its rows in ascending order: begin and end of runs that do not touch.
  const std::map<int64_t, int64_t>& runs() const { return runs_; }
  int64_t count() const;

 private:
  std::map<int64_t, int64_t> runs_;
};

/// The queries, or the keys, of all rectangles.
RowSet queries_of(std::span<const Rectangle> rectangles);
RowSet keys_of(std::span<const Rectangle> rectangles);

}  // namespace gyre
