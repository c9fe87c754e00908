#pragma once
// Documents that begin alike, stored once: what a model reads of prompts with several answers.
//
//     documents     0: P P P P a a a      1: P P P P b b      2: P P P P a a a c c
//     min_prefix    3
//
//     tree          node 0   P P P P      of documents 0 2 1
//                   node 1   a a a        of documents 0 2, child of 0; document 0 ends here
//                   node 2   c c          of document  2,   child of 1
//                   node 3   b b          of document  1,   child of 0
//     stream        P P P P a a a c c b b          11 tokens instead of 22
//     positions     0 1 2 3 4 5 6 7 8 4 5          those in the documents
//
// A token sees its node and the ancestors of it. Inside a node each row predicts the next one; the
// last row of a node predicts the first token of every child. A document that shares nothing is a
// tree of one node, so that code which reads trees has no other case.

#include <cstdint>
#include <span>
#include <vector>

#include "core/ragged.hpp"

namespace gyre {

struct PrefixOptions {
  int64_t min_prefix = 64;  ///< tokens that a node adds to those before it, if documents share it
  int64_t max_tokens = 0;   ///< of a tree of several documents; 0: any number
};

/// Tokens that lie next to each other in the stream of a tree.
struct PrefixNode {
  int32_t parent = -1;         ///< in the tree, before this node; -1: none
  int32_t descendants = 0;     ///< they follow this node
  int64_t begin = 0;           ///< of the stream
  int64_t length = 0;          ///< 0: an empty document
  int64_t position = 0;        ///< of its first token in the documents
  int64_t first_document = 0;  ///< in PrefixForest::documents
  int64_t documents = 0;       ///< that have these tokens: the weight of what the node predicts
  int64_t end() const { return begin + length; }
  friend bool operator==(const PrefixNode&, const PrefixNode&) = default;
};

struct PrefixForest {
  std::vector<int64_t> tree_offsets{0};  ///< [trees + 1], in nodes
  std::vector<PrefixNode> nodes;         ///< of a tree: parents before children, depth first
  std::vector<int64_t> documents;  ///< document numbers; those of a node, then of its children

  int64_t trees() const { return std::ssize(tree_offsets) - 1; }
  std::span<const PrefixNode> tree(int64_t t) const;
  std::span<const int64_t> documents_of(const PrefixNode& node) const;
  /// Tokens of the stream of a tree.
  int64_t tokens(int64_t t) const { return tree(t).back().end(); }
  std::vector<int64_t> lengths() const;  ///< [trees] of their streams
  /// Pairs that see each other: Σ over nodes of L(L+1)/2 + L · position.
  int64_t pairs(int64_t t) const;
  /// Whether some token is stored for several documents.
  bool shares() const { return trees() < std::ssize(documents); }
  /// Token `at` of the stream of a tree, as token `position` of document `document`.
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
  const size_t end = node + 1 + static_cast<size_t>(tree[node].descendants);
  for (size_t child = node + 1; child < end;
       child += 1 + static_cast<size_t>(tree[child].descendants))
    f(child);
}

/// Every document a tree of its own: documents of these offsets [documents + 1].
PrefixForest separate_documents(std::span<const int64_t> offsets);

/// Trees of documents that begin with the same tokens, at least min_prefix of them, in the order of
/// their first documents. A tree that would have more than max_tokens becomes several; a document
/// that alone has more is a tree of its own. Throws a usage error unless min_prefix >= 1.
/// O(n log n) comparisons of documents.
PrefixForest share_prefixes(const DocumentView& documents, const PrefixOptions& options);

/// The tokens of the stream of a tree. [tokens(t)]
std::vector<int32_t> tokens_of_tree(const PrefixForest& forest, int64_t t,
                                    const DocumentView& documents);

/// Tokens of trees, or of documents, one after the other.
struct RaggedTokens {
  std::vector<int32_t> tokens;
  std::vector<int64_t> offsets{0};  ///< [items + 1]
};

/// The documents that trees were made of, from the tokens of these. Throws a usage error when the
/// offsets [trees + 1] are not those of the trees, or a document number is missing or twice.
RaggedTokens separated_tokens(const PrefixForest& forest, const RaggedTokens& stored);

/// What sharing saves.
struct PrefixSavings {
  int64_t documents = 0, trees = 0;
  int64_t tokens = 0, stored_tokens = 0;  ///< of all documents, of all trees
  int64_t pairs = 0, stored_pairs = 0;    ///< under a causal mask, a head and layer
};
PrefixSavings savings_of(const PrefixForest& forest);

}  // namespace gyre
