#include "packing/prefix_forest.hpp"

#include <numeric>

#include "core/error.hpp"

namespace gyre {
namespace {

/// Builds nodes from documents sorted by their tokens.
class TreeBuilder {
 public:
  TreeBuilder(const DocumentView& documents, const PrefixOptions& options)
      : documents_(documents), options_(options), order_(documents.size()) {
    std::iota(order_.begin(), order_.end(), 0);
    std::sort(order_.begin(), order_.end(), [&](int64_t a, int64_t b) {
      const auto x = documents.document(a), y = documents.document(b);
      const auto [p, q] = std::mismatch(x.begin(), x.end(), y.begin(), y.end());
      if (p == x.end() && q == y.end()) return a < b;
      return p == x.end() || (q != y.end() && *p < *q);
    });
    shared_.resize(order_.size(), 0);
    for (size_t i = 1; i < order_.size(); ++i) {
      const auto x = documents.document(order_[i - 1]), y = documents.document(order_[i]);
      shared_[i] = std::mismatch(x.begin(), x.end(), y.begin(), y.end()).first - x.begin();
    }
  }

  /// Sorted documents [begin, end), which share their first `depth` tokens.
  struct Range {
    size_t begin, end;
    int64_t depth;
    int32_t parent;
    int64_t first;  ///< the smallest document number
  };

  /// Root ranges of all trees, ordered by their first document.
  std::vector<Range> trees() const {
    std::vector<Range> all;
    for (const Range& group : groups({0, order_.size(), 0, -1, 0})) {
      size_t begin = group.begin;
      while (begin < group.end) {
        const size_t end = last_that_fits(begin, group.end);
        all.push_back(range(begin, end, 0, -1));
        begin = end;
      }
    }
    std::ranges::sort(all, {}, &Range::first);
    return all;
  }

  /// Appends the nodes and documents of one tree.
  void add_tree(const Range& tree, PrefixForest& forest) const {
    const size_t first = forest.tree_offsets.back();
    int64_t tokens = 0;
    std::vector<Range> open = {tree};
    while (!open.empty()) {
      const Range now = open.back();
      open.pop_back();
      const int64_t depth = shared_by(now);
      PrefixNode node;
      node.parent = now.parent;
      node.begin = tokens;
      node.length = depth - now.depth;
      node.position = now.depth;
      node.first_document = std::ssize(forest.documents);
      node.documents = now.end - now.begin;
      tokens += node.length;
      const auto index = static_cast<int32_t>(forest.nodes.size() - first);
      for (int32_t a = node.parent; a >= 0;) {
        PrefixNode& ancestor = forest.nodes[first + a];
        ++ancestor.descendants;
        a = ancestor.parent;
      }
      forest.nodes.push_back(node);
      Range rest = {now.begin, now.end, depth, index, 0};
      for (; rest.begin < rest.end && length(rest.begin) == depth; ++rest.begin)
        forest.documents.push_back(order_[rest.begin]);
      std::vector<Range> children = groups(rest);
      open.insert(open.end(), children.rbegin(), children.rend());
    }
    forest.tree_offsets.push_back(std::ssize(forest.nodes));
  }

 private:
  int64_t length(size_t i) const { return documents_.length(order_[i]); }
  Range range(size_t begin, size_t end, int64_t depth, int32_t parent) const {
    return {begin, end, depth, parent,
            *std::min_element(order_.begin() + begin, order_.begin() + end)};
  }
  /// Length of the prefix that all documents of a range share.
  int64_t shared_by(const Range& range) const {
    if (range.end - range.begin == 1) return length(range.begin);
    return *std::min_element(shared_.begin() + range.begin + 1, shared_.begin() + range.end);
  }
  /// Maximal parts of a range that share min_prefix tokens after its depth, by first document.
  std::vector<Range> groups(const Range& all) const {
    std::vector<Range> parts;
    for (size_t begin = all.begin; begin < all.end;) {
      size_t end = begin + 1;
      while (end < all.end && shared_[end] >= all.depth + options_.min_prefix) ++end;
      parts.push_back(range(begin, end, all.depth, all.parent));
      begin = end;
    }
    std::ranges::sort(parts, {}, &Range::first);
    return parts;
  }
  int64_t tokens_of(size_t begin, size_t end) const {
    PrefixForest one;
    add_tree(range(begin, end, 0, -1), one);
    return one.tokens(0);
  }
  /// End of the longest part from `begin` on that makes a tree of at most max_tokens: a binary
  /// search, since the number of tokens grows with the number of documents.
  size_t last_that_fits(size_t begin, size_t end) const {
    if (options_.max_tokens <= 0) return end;
    size_t fits = begin + 1, step = 1;
    while (fits < end && tokens_of(begin, std::min(end, fits + step)) <= options_.max_tokens) {
      fits = std::min(end, fits + step);
      step *= 2;
    }
    for (; step > 0; step /= 2)
      if (fits + step <= end && tokens_of(begin, fits + step) <= options_.max_tokens) fits += step;
    return fits;
  }

  const DocumentView& documents_;
  const PrefixOptions& options_;
  std::vector<int64_t> order_;   // document numbers
  std::vector<int64_t> shared_;  // [i] length of the common prefix of order_[i] and order_[i - 1]
};

}  // namespace

std::span<const PrefixNode> PrefixForest::tree(int64_t t) const {
  const size_t begin = tree_offsets[t];
  const size_t end = tree_offsets[t + 1];
  return std::span(nodes).subspan(begin, end - begin);
}

std::span<const int64_t> PrefixForest::documents_of(const PrefixNode& node) const {
  return std::span(documents).subspan(node.first_document, node.documents);
}

std::vector<int64_t> PrefixForest::lengths() const {
  std::vector<int64_t> all;
  for (int64_t t = 0; t < trees(); ++t) all.push_back(tokens(t));
  return all;
}

int64_t PrefixForest::pairs(int64_t t) const {
  int64_t sum = 0;
  for (const PrefixNode& node : tree(t))
    sum += node.length * (node.length + 1) / 2 + node.length * node.position;
  return sum;
}

PrefixForest::Source PrefixForest::source(int64_t t, int64_t at) const {
  const PrefixNode& node = tree(t)[node_at(tree(t), at)];
  return {documents_of(node).front(), node.position + at - node.begin};
}

size_t node_at(std::span<const PrefixNode> tree, int64_t at) {
  const auto behind = std::ranges::upper_bound(tree, at, {}, &PrefixNode::begin);
  return behind - tree.begin() - 1;
}

PrefixForest separate_documents(std::span<const int64_t> offsets) {
  PrefixForest forest;
  for (size_t d = 0; d + 1 < offsets.size(); ++d) {
    PrefixNode node;
    node.length = offsets[d + 1] - offsets[d];
    node.first_document = d;
    node.documents = 1;
    forest.nodes.push_back(node);
    forest.documents.push_back(d);
    forest.tree_offsets.push_back(std::ssize(forest.nodes));
  }
  return forest;
}

PrefixForest share_prefixes(const DocumentView& documents, const PrefixOptions& options) {
  if (options.min_prefix < 1)
    throw_usage("a shared prefix of at least {} tokens; the least is 1", options.min_prefix);
  const TreeBuilder builder(documents, options);
  PrefixForest forest;
  for (const TreeBuilder::Range& tree : builder.trees()) builder.add_tree(tree, forest);
  return forest;
}

std::vector<int32_t> tokens_of_tree(const PrefixForest& forest, int64_t t,
                                    const DocumentView& documents) {
  std::vector<int32_t> tokens;
  for (const PrefixNode& node : forest.tree(t)) {
    const auto text =
        documents.document(forest.documents_of(node).front()).subspan(node.position, node.length);
    tokens.insert(tokens.end(), text.begin(), text.end());
  }
  return tokens;
}

RaggedTokens separated_tokens(const PrefixForest& forest, const RaggedTokens& stored) {
  const int64_t count = std::ssize(forest.documents);
  std::vector<std::vector<int32_t>> texts(forest.documents.size());
  std::vector<bool> seen(forest.documents.size(), false);
  if (std::ssize(stored.offsets) != forest.trees() + 1)
    throw_usage("tokens of {} trees; there are {}", stored.offsets.size() - 1, forest.trees());
  for (const int64_t document : forest.documents) {
    if (document < 0 || document >= count)
      throw_usage("a tree has document {} of {}", document, count);
    if (seen[document]) throw_usage("document {} is in two trees", document);
    seen[document] = true;
  }
  for (int64_t t = 0; t < forest.trees(); ++t) {
    const int64_t begin = stored.offsets[t];
    const int64_t tokens = stored.offsets[t + 1] - begin;
    if (tokens != forest.tokens(t))
      throw_usage("tree {} has {} tokens, not {}", t, forest.tokens(t), tokens);
    for (const PrefixNode& node : forest.tree(t))
      for (const int64_t document : forest.documents_of(node)) {
        const auto text = std::span(stored.tokens).subspan(begin + node.begin, node.length);
        auto& whole = texts[document];
        whole.insert(whole.end(), text.begin(), text.end());
      }
  }
  RaggedTokens separate;
  for (const auto& text : texts) {
    separate.tokens.insert(separate.tokens.end(), text.begin(), text.end());
    separate.offsets.push_back(std::ssize(separate.tokens));
  }
  return separate;
}

PrefixSavings savings_of(const PrefixForest& forest) {
  PrefixSavings s;
  s.documents = std::ssize(forest.documents);
  s.trees = forest.trees();
  for (int64_t t = 0; t < forest.trees(); ++t) {
    s.stored_tokens += forest.tokens(t);
    s.stored_pairs += forest.pairs(t);
  }
  for (const PrefixNode& node : forest.nodes) {
    s.tokens += node.documents * node.length;
    s.pairs += node.documents * (node.length * (node.length + 1) / 2 + node.length * node.position);
  }
  return s;
}

}  // namespace gyre
