#include "io/schemas/prefix_tables.hpp"

#include <fmt/format.h>

#include <limits>

namespace gyre {
namespace {

constexpr const char* prefixes_group = "/packed/prefixes";
constexpr const char* tree_offsets_path = "/packed/prefixes/tree_offsets";
constexpr const char* nodes_path = "/packed/prefixes/nodes";
constexpr const char* documents_path = "/packed/prefixes/documents";
constexpr int64_t node_columns = 4;

/// Describes what is wrong with node n of a tree, or returns "". The tree's documents begin at
/// `first` in the list PrefixTables::documents, which has `count` entries.
std::string fault_of(std::span<const StoredNode> tree, size_t n, int64_t first, int64_t count) {
  const StoredNode& node = tree[n];
  constexpr int64_t most = std::numeric_limits<int32_t>::max();
  const int64_t least = tree.size() > 1 ? 1 : 0;
  if (node.tokens < least || node.tokens > most)
    return fmt::format("{} tokens; there are {} to {}", node.tokens, least, most);
  if (n == 0) {
    if (node.parent != -1)
      return fmt::format("parent {}; the first node has none, -1", node.parent);
    if (node.first_document != first || node.documents < 1 || node.documents > count - first)
      return fmt::format("{} documents of the list from {} on; they begin at {}, {} are left",
                         node.documents, node.first_document, first, count - first);
    return "";
  }
  // Depth first: the parent is the previous node or one of its ancestors.
  int64_t above = static_cast<int64_t>(n) - 1, begin = tree[n - 1].first_document;
  for (; above >= 0 && above != node.parent; above = tree[above].parent)
    begin = tree[above].first_document + tree[above].documents;
  if (above < 0)
    return fmt::format("parent {}; node {} and those above it can be", node.parent, n - 1);
  const StoredNode& parent = tree[above];
  const int64_t end = parent.first_document + parent.documents;
  if (node.documents < 1 || node.first_document < begin ||
      node.first_document > end - node.documents)
    return fmt::format("{} documents of the list from {} on; its parent has {} to {} left",
                       node.documents, node.first_document, begin, end - 1);
  return "";
}

}  // namespace

std::span<const StoredNode> PrefixTables::tree(int64_t t) const {
  const size_t begin = tree_offsets[t];
  const size_t end = tree_offsets[t + 1];
  return std::span(nodes).subspan(begin, end - begin);
}

void check_prefixes(ConfigErrors& errors, const PrefixTables& tables) {
  if (tables.empty()) return;
  const size_t before = errors.messages().size();
  check_offsets(errors, tree_offsets_path, tables.tree_offsets, std::ssize(tables.nodes),
                fmt::format("the rows of {}", nodes_path));
  if (errors.messages().size() != before) return;
  const int64_t count = std::ssize(tables.documents);
  int64_t listed = 0;
  for (int64_t t = 0; t < tables.trees(); ++t) {
    const auto tree = tables.tree(t);
    if (tree.empty()) return errors.add("{}: tree {} has no node", tree_offsets_path, t);
    for (size_t n = 0; n < tree.size(); ++n)
      if (const std::string fault = fault_of(tree, n, listed, count); !fault.empty())
        return errors.add("{}: tree {}, node {}: {}", nodes_path, t, n, fault);
    listed += tree.front().documents;
  }
  if (listed != count)
    return errors.add("{} lists {} documents, the trees have {}", documents_path, count, listed);
  std::vector<bool> seen(tables.documents.size(), false);
  for (size_t i = 0; i < tables.documents.size(); ++i) {
    const int64_t document = tables.documents[i];
    if (document < 0 || document >= count || seen[document])
      return errors.add("{}[{}] is {}; each of 0 to {} is listed once", documents_path, i, document,
                        count - 1);
    seen[document] = true;
  }
}

void write_prefixes(h5::File& file, const PrefixTables& tables) {
  if (tables.empty()) return;
  file.create_group(prefixes_group);
  file.write_dataset(tree_offsets_path, std::span<const int64_t>(tables.tree_offsets));
  file.write_dataset(documents_path, std::span<const int64_t>(tables.documents));
  std::vector<int64_t> cells;
  for (const StoredNode& n : tables.nodes)
    cells.insert(cells.end(), {n.parent, n.tokens, n.first_document, n.documents});
  file.write_dataset(nodes_path, std::span<const int64_t>(cells),
                     {std::ssize(tables.nodes), node_columns});
}

PrefixParts open_prefixes(SchemaReader& reader) {
  PrefixParts parts;
  if (!reader.is_there(prefixes_group)) return parts;
  parts.tree_offsets = reader.dataset(tree_offsets_path, {h5::Type::i64}, {-1});
  parts.nodes = reader.dataset(nodes_path, {h5::Type::i64}, {-1, node_columns});
  parts.documents = reader.dataset(documents_path, {h5::Type::i64}, {-1});
  return parts;
}

PrefixTables read_prefixes(const PrefixParts& parts) {
  PrefixTables tables;
  if (!parts.nodes) return tables;
  tables.tree_offsets = parts.tree_offsets->read_all<int64_t>();
  tables.documents = parts.documents->read_all<int64_t>();
  const std::vector<int64_t> cells = parts.nodes->read_all<int64_t>();
  for (size_t i = 0; i + node_columns <= cells.size(); i += node_columns)
    tables.nodes.push_back({cells[i], cells[i + 1], cells[i + 2], cells[i + 3]});
  return tables;
}

}  // namespace gyre
