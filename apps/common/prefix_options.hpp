#pragma once
// Shared prefixes of documents, stored once: --share-prefixes and --min-prefix.

#include <cstdint>
#include <string>

#include "core/error.hpp"
#include "io/prefix_tables.hpp"
#include "packing/prefix_forest.hpp"

namespace CLI {
class App;
}

namespace gyre {

struct PrefixChoice {
  bool share = false;
  int64_t min_prefix = 64;

  /// The trees of documents; without sharing, each document is a tree. A tree of several documents
  /// has at most `max_tokens`.
  PrefixForest forest_of(const DocumentView& documents, int64_t max_tokens) const;
};

void declare_prefix_options(CLI::App& app, PrefixChoice& o);
void check_prefix_options(const PrefixChoice& o, ConfigErrors& errors);

/// A "#" line with the savings of sharing.
std::string savings_text(const PrefixForest& forest);

/// Convert between trees and their tables in files. Precondition: the tables were checked.
PrefixTables tables_of(const PrefixForest& forest);
PrefixForest forest_of(const PrefixTables& tables);

}  // namespace gyre
