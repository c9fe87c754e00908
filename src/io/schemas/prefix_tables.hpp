#pragma once
// Trees of documents with common prefixes (packing/prefix_forest.hpp) as tables: group
// /packed/prefixes of packed streams and results, whose segments then hold trees.

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "io/schemas/schema.hpp"

namespace gyre {

/// Columns of the table of nodes.
struct StoredNode {
  int64_t parent = -1;         ///< index within its tree; -1: root
  int64_t tokens = 0;          ///< tokens of the node alone
  int64_t first_document = 0;  ///< index into PrefixTables::documents
  int64_t documents = 0;
  friend bool operator==(const StoredNode&, const StoredNode&) = default;
};

/// Tables of all trees; if empty, segments hold documents.
struct PrefixTables {
  std::vector<int64_t> tree_offsets{0};  ///< [trees + 1], in nodes
  std::vector<StoredNode> nodes;         ///< of a tree: parents before children, depth first
  std::vector<int64_t> documents;        ///< documents of a node, then those of its children

  bool empty() const { return tree_offsets.size() == 1; }
  int64_t trees() const { return std::ssize(tree_offsets) - 1; }
  std::span<const StoredNode> tree(int64_t t) const;
};

/// Adds the first error in the tables to `errors`, by tree and node.
void check_prefixes(ConfigErrors& errors, const PrefixTables& tables);

/// Creates the group unless there are no trees. Serial.
void write_prefixes(h5::File& file, const PrefixTables& tables);

/// Datasets of the tables; unset if the file has no such group.
struct PrefixParts {
  std::optional<h5::Dataset> tree_offsets, nodes, documents;
};
/// Finds the tables. No communication.
PrefixParts open_prefixes(SchemaReader& reader);
/// Reads the tables. Collective.
PrefixTables read_prefixes(const PrefixParts& parts);

}  // namespace gyre
