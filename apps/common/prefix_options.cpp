#include "apps/common/prefix_options.hpp"

#include <fmt/format.h>

#include "report/options.hpp"

namespace gyre {
namespace {

double ratio(int64_t a, int64_t b) {
  return b > 0 ? static_cast<double>(a) / static_cast<double>(b) : 1;
}

}  // namespace

PrefixForest PrefixChoice::forest_of(const DocumentView& documents, int64_t max_tokens) const {
  if (!share) return separate_documents(documents.offsets);
  return share_prefixes(documents, {min_prefix, max_tokens});
}

void declare_prefix_options(CLI::App& app, PrefixChoice& o) {
  add_flag(app,
           {"--share-prefixes",
            "Store what documents begin with in common once: a prompt and its answers"},
           o.share);
  add_size_option(app,
                  {"--min-prefix", "For --share-prefixes: tokens that are worth sharing, at least"},
                  o.min_prefix, 1);
}

void check_prefix_options(const PrefixChoice& o, ConfigErrors& errors) {
  if (!o.share && o.min_prefix != PrefixChoice().min_prefix)
    errors.add("--min-prefix {} needs --share-prefixes", o.min_prefix);
}

std::string savings_text(const PrefixForest& forest) {
  const PrefixSavings s = savings_of(forest);
  return fmt::format(
      "# prefixes  {} documents in {} tree{}: {} tokens instead of {} ({:.2f}x), {} pairs instead "
      "of "
      "{} ({:.2f}x)\n",
      s.documents, s.trees, s.trees == 1 ? "" : "s", s.stored_tokens, s.tokens,
      ratio(s.tokens, s.stored_tokens), s.stored_pairs, s.pairs, ratio(s.pairs, s.stored_pairs));
}

PrefixTables tables_of(const PrefixForest& forest) {
  PrefixTables tables;
  if (!forest.shares()) return tables;
  tables.tree_offsets = forest.tree_offsets;
  tables.documents = forest.documents;
  for (const PrefixNode& node : forest.nodes)
    tables.nodes.push_back({node.parent, node.length, node.first_document, node.documents});
  return tables;
}

PrefixForest forest_of(const PrefixTables& tables) {
  PrefixForest forest;
  forest.tree_offsets = tables.tree_offsets;
  forest.documents = tables.documents;
  for (int64_t t = 0; t < tables.trees(); ++t) {
    const size_t first = tables.tree_offsets[t];
    int64_t begin = 0;
    for (const StoredNode& stored : tables.tree(t)) {
      PrefixNode node;
      node.parent = static_cast<int32_t>(stored.parent);
      node.begin = begin;
      node.length = stored.tokens;
      node.first_document = stored.first_document;
      node.documents = stored.documents;
      for (int64_t a = stored.parent; a >= 0;) {
        PrefixNode& ancestor = forest.nodes[first + a];
        if (a == stored.parent) node.position = ancestor.position + ancestor.length;
        ++ancestor.descendants;
        a = ancestor.parent;
      }
      begin += node.length;
      forest.nodes.push_back(node);
    }
  }
  return forest;
}

}  // namespace gyre
