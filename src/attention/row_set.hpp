#pragma once
// Set of rows of an array, for example those that have been written.

#include <cstdint>
#include <span>
#include <vector>

#include "attention/rectangle.hpp"

namespace gyre {

class RowSet {
 public:
  /// Rows [begin, end).
  struct Run {
    int64_t begin = 0, end = 0;
    friend bool operator==(const Run&, const Run&) = default;
  };
  /// Adds rows [begin, end); returns how many of them were in the set before. O(log runs) if rows
  /// come in ascending order or are in the set already, else O(runs).
  int64_t add(int64_t begin, int64_t end);
  /// The rows in ascending order, as maximal runs.
  const std::vector<Run>& runs() const { return runs_; }
  int64_t count() const;

 private:
  std::vector<Run> runs_;
};

/// The queries, or the keys, of all rectangles.
RowSet queries_of(std::span<const Rectangle> rectangles);
RowSet keys_of(std::span<const Rectangle> rectangles);

}  // namespace gyre
