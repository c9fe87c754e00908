#pragma once
// Prefix trees: documents with a common prefix store it once, e.g. prompts with several answers.
//
//     documents     0: P P P P a a a      1: P P P P b b      2: P P P P a a a c c
//     min_prefix    3
//
//     tree          node 0   P P P P      documents 0 2 1
//                   node 1   a a a        documents 0 2, child of 0; document 0 ends here
//                   node 2   c c          document  2,   child of 1
//                   node 3   b b          document  1,   child of 0
//     stream        P P P P a a a c c b b          11 tokens instead of 22
//     positions     0 1 2 3 4 5 6 7 8 4 5          positions in the documents
//
// A token sees its node up to itself, and all ancestors. Inside a node each token predicts the next
// one; the last token of a node predicts the first of every child. A document without a shared
// prefix is a tree of one node, so that readers need no special case.

#include <cstdint>
#include <span>
#include <vector>

#include "core/ragged.hpp"

namespace gyre {

struct PrefixOptions {
  int64_t min_prefix = 64;  ///< smallest number of tokens of a shared node
  int64_t max_tokens = 0;   ///< limit for a tree of several documents; 0: no limit
};

/// Consecutive tokens in the stream of a tree.
struct PrefixNode {
  int32_t parent = -1;         ///< index in the tree, lower than this node's; -1: root
  int32_t descendants = 0;     ///< number of nodes below; they follow this node
  int64_t begin = 0;           ///< first token in the stream
  int64_t length = 0;          ///< 0: an empty document
  int64_t position = 0;        ///< of the first token, in its documents
  int64_t first_document = 0;  ///< index into PrefixForest::documents
  int64_t documents = 0;       ///< number sharing these tokens: weight of the node's predictions
  int64_t end() const { return begin + length; }
  friend bool operator==(const PrefixNode&, const PrefixNode&) = default;
};

struct PrefixForest {
  std::vector<int64_t> tree_offsets{0};  ///< [trees + 1], in nodes
  std::vector<PrefixNode> nodes;         ///< by tree: parents before children, depth first
  /// [documents] Document numbers, by node. Those that end at a node precede those of its children.
  std::vector<int64_t> documents;

  int64_t trees() const { return std::ssize(tree_offsets) - 1; }
  std::span<const PrefixNode> tree(int64_t t) const;
  std::span<const int64_t> documents_of(const PrefixNode& node) const;
  /// Length of the stream of tree t.
  int64_t tokens(int64_t t) const { return tree(t).back().end(); }
  std::vector<int64_t> lengths() const;  ///< [trees] stream lengths
  /// Visible pairs: Σ over nodes of L(L+1)/2 + L · position.
  int64_t pairs(int64_t t) const;
  /// Whether any token is stored once for several documents.
  bool shares() const { return trees() < std::ssize(documents); }
  /// Token `position` of document `document`.
  struct Source {
    int64_t document, position;
  };
  Source source(int64_t t, int64_t at) const;
  friend bool operator==(const PrefixForest&, const PrefixForest&) = default;
};

/// The index of the node that holds token `at` of the stream of its tree.
size_t node_at(std::span<const PrefixNode> tree, int64_t at);

/// Calls f(child) for the indices of the children of a node.
template <class F>
void for_each_child(std::span<const PrefixNode> tree, size_t node, F f) {
  const size_t end = node + 1 + tree[node].descendants;
  for (size_t child = node + 1; child < end; child += 1 + tree[child].descendants) f(child);
}

/// One tree per document. offsets: [documents + 1].
PrefixForest separate_documents(std::span<const int64_t> offsets);

/// Builds trees of documents that share at least min_prefix first tokens, in the order of their
/// first documents. A tree above max_tokens is split; a single document above it is a tree of its
/// own. Throws a usage error unless min_prefix >= 1. O(n log n) comparisons of documents.
PrefixForest share_prefixes(const DocumentView& documents, const PrefixOptions& options);

/// Tokens of the stream of tree t: [tokens(t)].
std::vector<int32_t> tokens_of_tree(const PrefixForest& forest, int64_t t,
                                    const DocumentView& documents);

/// Concatenated tokens of trees or of documents.
struct RaggedTokens {
  std::vector<int32_t> tokens;
  std::vector<int64_t> offsets{0};  ///< [items + 1]
};

/// Inverse of share_prefixes: documents from the tokens of their trees. Throws a usage error when
/// the offsets [trees + 1] do not match the trees, or a document number is missing or repeated.
RaggedTokens separated_tokens(const PrefixForest& forest, const RaggedTokens& stored);

/// Savings by sharing prefixes.
struct PrefixSavings {
  int64_t documents = 0, trees = 0;
  int64_t tokens = 0, stored_tokens = 0;  ///< of all documents, of all trees
  int64_t pairs = 0, stored_pairs = 0;    ///< causal mask, per head and layer
};
PrefixSavings savings_of(const PrefixForest& forest);

}  // namespace gyre
