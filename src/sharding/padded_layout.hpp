#pragma once
// A layout of documents of any length.

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "sharding/layouts.hpp"

namespace gyre {

/// Concatenates documents, each padded to a multiple of kind.segment_multiple(options.cp) slots.
/// `offsets` [documents + 1]: prefix sums of document lengths in tokens. Throws a usage error for
/// more than 2^31 - 1 slots.
struct PaddedLayout {
  std::vector<int32_t> real = {0}, padded = {0};  ///< as SegmentBounds
  Layout layout;
  PaddedLayout(std::span<const int64_t> offsets, const LayoutKind& kind,
               const LayoutOptions& options);
};

/// Layouts of documents of which only the last tokens have queries: a new chunk, whose keys are
/// where its queries are, behind the tokens that earlier chunks have placed.
///
///     a document of 6 tokens abcdef, of which e and f are new; cp = 2, contiguous
///                     rank 0     rank 1
///     layout          a b  e     c d  f
///     query_layout         e          f
struct QueryLayouts {
  Layout layout;                       ///< of all tokens
  std::optional<Layout> query_layout;  ///< of the new ones; absent: all tokens have queries
  /// query_offsets [documents + 1]: prefix sums of queries; empty: all tokens have one.
  QueryLayouts(std::span<const int64_t> offsets, std::span<const int64_t> query_offsets,
               const LayoutKind& kind, const LayoutOptions& options);
  /// The layout of the queries for a problem; null without one of their own.
  const Layout* queries() const { return query_layout ? &*query_layout : nullptr; }
};

}  // namespace gyre
