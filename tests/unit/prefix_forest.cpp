// Trees of documents that begin alike: against the set of their prefixes, and as masks, positions
// and predictions against the documents themselves.

#include "packing/prefix_forest.hpp"

#include <gtest/gtest.h>
#include <rapidcheck.h>

#include <map>
#include <set>

#include "apps/common/workload_options.hpp"
#include "attention/attention_reference.hpp"
#include "core/token_random.hpp"
#include "errors.hpp"
#include "layout_cases.hpp"
#include "model/shared_prefixes.hpp"

namespace gyre {
namespace GYRE_FILE {

using Tokens = std::vector<int32_t>;

struct Texts {
  Tokens tokens;
  std::vector<int64_t> offsets = {0};
  explicit Texts(const std::vector<Tokens>& documents) {
    for (const Tokens& d : documents) {
      tokens.insert(tokens.end(), d.begin(), d.end());
      offsets.push_back(std::ssize(tokens));
    }
  }
  DocumentView view() const { return {tokens, offsets}; }
};

/// Up to 8 documents of up to 9 tokens of two kinds: many begin alike, and some are equal.
Texts arbitrary_texts() {
  std::vector<Tokens> documents;
  const int count = *rc::gen::inRange(0, 9);
  for (int d = 0; d < count; ++d) {
    Tokens& text = documents.emplace_back();
    if (d > 0 && *rc::gen::inRange(0, 2) == 1) {
      text = documents[*rc::gen::inRange(0, d)];
      text.resize(*rc::gen::inRange<int64_t>(0, std::ssize(text) + 1));
    }
    const int more = *rc::gen::inRange(0, 6);
    for (int i = 0; i < more; ++i) text.push_back(*rc::gen::inRange(0, 2));
  }
  return Texts(documents);
}

RaggedTokens streams_of(const PrefixForest& forest, const Texts& texts) {
  RaggedTokens streams;
  for (int64_t t = 0; t < forest.trees(); ++t) {
    const Tokens stream = tokens_of_tree(forest, t, texts.view());
    for (int64_t at = 0; at < std::ssize(stream); ++at) {
      const auto [document, position] = forest.source(t, at);
      EXPECT_EQ(texts.view().document(document)[position], stream[at]);
    }
    streams.tokens.insert(streams.tokens.end(), stream.begin(), stream.end());
    streams.offsets.push_back(std::ssize(streams.tokens));
  }
  return streams;
}

/// P P P P a a a, P P P P b b, P P P P a a a c c: the example of the header.
Texts example() {
  return Texts({{9, 9, 9, 9, 1, 1, 1}, {9, 9, 9, 9, 2, 2}, {9, 9, 9, 9, 1, 1, 1, 3, 3}});
}

TEST(SharePrefixes, TheExampleOfTheHeader) {
  const PrefixForest forest = share_prefixes(example().view(), {3, 0});
  ASSERT_EQ(forest.trees(), 1);
  EXPECT_EQ(forest.documents, (std::vector<int64_t>{0, 2, 1}));
  const PrefixNode nodes[] = {
      {-1, 3, 0, 4, 0, 0, 3}, {0, 1, 4, 3, 4, 0, 2}, {1, 0, 7, 2, 7, 1, 1}, {0, 0, 9, 2, 4, 2, 1}};
  EXPECT_TRUE(std::ranges::equal(forest.tree(0), nodes));
  EXPECT_EQ(forest.pairs(0), 10 + 18 + 17 + 11);
  EXPECT_EQ(tokens_of_tree(forest, 0, example().view()), (Tokens{9, 9, 9, 9, 1, 1, 1, 3, 3, 2, 2}));
  // What is shared must be worth it: a a a is not, of four.
  const PrefixForest two = share_prefixes(example().view(), {4, 0});
  EXPECT_EQ(two.tree(0).size(), 4U);
  EXPECT_EQ(two.tokens(0), 4 + 3 + 2 + 5);
  EXPECT_EQ(share_prefixes(example().view(), {5, 0}).trees(), 2);
  test::expect_usage("a shared prefix of at least 0 tokens; the least is 1", [] {
    share_prefixes(example().view(), {0, 0});
  });
}

TEST(SharePrefixes, SavingsOfAPromptAndItsAnswers) {
  for (const auto& [answers, stored, pairs] :
       {std::tuple{8, 5120, 5769728}, {64, 33792, 42484224}}) {
    std::vector<Tokens> documents;
    for (int32_t d = 0; d < answers; ++d) {
      documents.emplace_back(1024 + 512, 7);
      documents.back()[1024] = 100 + d;
    }
    const PrefixSavings s = savings_of(share_prefixes(Texts(documents).view(), {}));
    EXPECT_EQ(s.trees, 1);
    EXPECT_EQ(s.stored_tokens, stored);
    EXPECT_EQ(s.stored_pairs, pairs);
    EXPECT_EQ(s.tokens, answers * 1536);
    EXPECT_EQ(s.pairs, int64_t{answers} * 1536 * 1537 / 2);
  }
}

TEST(SharePrefixes, TreesAreTheSetOfPrefixes) {
  EXPECT_TRUE(rc::check("brute force", [] {
    const Texts texts = arbitrary_texts();
    const PrefixForest forest = share_prefixes(texts.view(), {1, 0});
    std::set<Tokens> prefixes;
    for (int64_t d = 0; d < texts.view().size(); ++d) {
      const auto text = texts.view().document(d);
      for (size_t n = 1; n <= text.size(); ++n)
        prefixes.insert({text.begin(), text.begin() + static_cast<std::ptrdiff_t>(n)});
    }
    const PrefixSavings s = savings_of(forest);
    RC_ASSERT(s.stored_tokens == std::ssize(prefixes));
    RC_ASSERT(s.tokens == texts.offsets.back());
    int64_t pairs = 0;
    for (const Tokens& prefix : prefixes) pairs += std::ssize(prefix);
    RC_ASSERT(s.stored_pairs == pairs);
  }));
}

TEST(SharePrefixes, DocumentsComeBackWhateverTheLimits) {
  EXPECT_TRUE(rc::check("round trip", [] {
    const Texts texts = arbitrary_texts();
    const PrefixOptions options{*rc::gen::inRange<int64_t>(1, 6),
                                *rc::gen::inRange<int64_t>(0, 20)};
    const PrefixForest forest = share_prefixes(texts.view(), options);
    const RaggedTokens back = separated_tokens(forest, streams_of(forest, texts));
    RC_ASSERT(back.tokens == texts.tokens);
    RC_ASSERT(back.offsets == texts.offsets);
    std::vector<int64_t> first;
    for (int64_t t = 0; t < forest.trees(); ++t) {
      const auto tree = forest.tree(t);
      const auto documents = forest.documents_of(tree.front());
      first.push_back(*std::ranges::min_element(documents));
      if (options.max_tokens > 0 && documents.size() > 1)
        RC_ASSERT(forest.tokens(t) <= options.max_tokens);
      for (const PrefixNode& node : tree)
        if (node.documents > 1) RC_ASSERT(node.length >= options.min_prefix);
    }
    RC_ASSERT(std::ranges::is_sorted(first));
    // Tables of files say the same, where there is anything to say.
    const PrefixTables tables = tables_of(forest);
    ConfigErrors errors;
    check_prefixes(errors, tables);
    RC_ASSERT(errors.empty());
    RC_ASSERT(tables.empty() == !forest.shares());
    if (forest.shares()) RC_ASSERT(forest_of(tables) == forest);
  }));
}

TEST(SharePrefixes, SeparateDocumentsAreTreesOfOneNode) {
  const PrefixForest forest = separate_documents(example().offsets);
  EXPECT_EQ(forest, share_prefixes(example().view(), {100, 0}));
  EXPECT_FALSE(forest.shares());
  EXPECT_EQ(forest.lengths(), (std::vector<int64_t>{7, 6, 9}));
}

TEST(SharePrefixes, WhatDoesNotFitIsNotSeparated) {
  const PrefixForest forest = share_prefixes(example().view(), {3, 0});
  RaggedTokens stored = streams_of(forest, example());
  PrefixForest twice = forest;
  twice.documents = {0, 2, 0};
  test::expect_usage("document 0 is in two trees", [&] { separated_tokens(twice, stored); });
  twice.documents = {0, 3, 1};
  test::expect_usage("a tree has document 3 of 3", [&] { separated_tokens(twice, stored); });
  stored.offsets.back() = 10;
  test::expect_usage("tree 0 has 11 tokens, not 10", [&] { separated_tokens(forest, stored); });
}

TEST(PrefixTables, FaultsAreNamed) {
  const PrefixTables good = tables_of(share_prefixes(example().view(), {3, 0}));
  const auto fault = [&](auto change) {
    PrefixTables tables = good;
    change(tables);
    ConfigErrors errors;
    check_prefixes(errors, tables);
    return errors.empty() ? "" : errors.messages().front();
  };
  const std::string nodes = "/packed/prefixes/nodes: tree 0, node ";
  EXPECT_EQ(fault([](PrefixTables&) {}), "");
  EXPECT_EQ(fault([](PrefixTables& t) { t.nodes[0].parent = 0; }),
            nodes + "0: parent 0; the first node has none, -1");
  EXPECT_EQ(fault([](PrefixTables& t) { t.nodes[3].parent = 3; }),
            nodes + "3: parent 3; node 2 and those above it can be");
  EXPECT_EQ(fault([](PrefixTables& t) { t.nodes[1].tokens = 0; }),
            nodes + "1: 0 tokens; there are 1 to 2147483647");
  EXPECT_EQ(fault([](PrefixTables& t) { t.nodes[3].first_document = 1; }),
            nodes + "3: 1 documents of the list from 1 on; its parent has 2 to 2 left");
  EXPECT_EQ(fault([](PrefixTables& t) { t.nodes[2].documents = 2; }),
            nodes + "2: 2 documents of the list from 1 on; its parent has 0 to 1 left");
  EXPECT_EQ(fault([](PrefixTables& t) { t.nodes[0].first_document = 1; }),
            nodes + "0: 3 documents of the list from 1 on; they begin at 0, 3 are left");
  EXPECT_EQ(
      fault([](PrefixTables& t) { t.nodes[0].documents = INT64_MAX; }),
      nodes +
          "0: 9223372036854775807 documents of the list from 0 on; they begin at 0, 3 are left");
  EXPECT_EQ(fault([](PrefixTables& t) { t.documents[1] = 0; }),
            "/packed/prefixes/documents[1] is 0; each of 0 to 2 is listed once");
  EXPECT_EQ(fault([](PrefixTables& t) { t.documents.push_back(3); }),
            "/packed/prefixes/documents lists 4 documents, the trees have 3");
  EXPECT_EQ(fault([](PrefixTables& t) {
              t.tree_offsets = {0, 4, 4};
            }),
            "/packed/prefixes/tree_offsets: tree 1 has no node");
}

/// Trees one after the other, in multiples of `multiple` slots.
struct Bin {
  PrefixForest forest;
  std::vector<int64_t> trees;
  test::Bounds bounds;
  std::vector<Tokens> streams;
  std::vector<std::span<const int32_t>> texts;

  Bin(const Texts& from, const PrefixOptions& options, int64_t multiple)
      : forest(share_prefixes(from.view(), options)) {
    for (int64_t t = 0; t < forest.trees(); ++t) {
      trees.push_back(t);
      bounds.add(forest.tokens(t), round_up(forest.tokens(t), multiple));
      streams.push_back(tokens_of_tree(forest, t, from.view()));
    }
    texts.assign(streams.begin(), streams.end());
  }
};

/// For each (document, position): (tree, position in its stream).
std::map<std::pair<int64_t, int64_t>, std::pair<int64_t, int64_t>> places(const Bin& bin) {
  std::map<std::pair<int64_t, int64_t>, std::pair<int64_t, int64_t>> all;
  for (int64_t t = 0; t < bin.forest.trees(); ++t)
    for (const PrefixNode& node : bin.forest.tree(t))
      for (const int64_t d : bin.forest.documents_of(node))
        for (int64_t i = 0; i < node.length; ++i) all[{d, node.position + i}] = {t, node.begin + i};
  return all;
}

TEST(SharedPrefixes, ARowSeesItsDocumentAndNothingElse) {
  EXPECT_TRUE(rc::check("brute force", [] {
    const Texts texts = arbitrary_texts();
    const Bin bin(texts, {*rc::gen::inRange<int64_t>(1, 4), 0}, 1);
    const MaskRule mask = mask_of(bin.forest, bin.trees);
    for (const auto& [key, place] : places(bin)) {
      const DocumentMask seen(mask, place.first, bin.forest.tokens(place.first));
      RC_ASSERT(seen.keys_of(place.second) == key.second + 1);
      for (int64_t q = 0; q <= key.second; ++q)
        RC_ASSERT(seen.sees(place.second, places(bin).at({key.first, q}).second));
    }
    for (const int64_t t : bin.trees)
      RC_ASSERT(visible_pairs(bin.forest.tokens(t), mask, t) == bin.forest.pairs(t));
  }));
}

TEST(SharedPrefixes, EveryPredictionOfEveryDocumentIsMadeOnce) {
  EXPECT_TRUE(rc::check("every layout", [] {
    const Texts texts = arbitrary_texts();
    const int cp = *rc::gen::inRange(1, 4);
    const LayoutKind& kind = *rc::gen::elementOf(layout_kinds());
    const Bin bin(texts, {*rc::gen::inRange<int64_t>(1, 4), 0}, kind.segment_multiple(cp));
    LayoutOptions options;
    options.cp = cp;
    const Layout layout = kind.make(bin.bounds.view(), options);
    std::map<std::pair<int64_t, int64_t>, int> tokens, predictions;
    for (int r = 0; r < cp; ++r) {
      const LocalBatch batch =
          make_local_batch(layout, bin.bounds.view(), bin.forest, bin.trees, bin.texts, r);
      const Shard& shard = layout.shard(r);
      RC_ASSERT(batch.targets.size() == batch.tokens.size() + batch.again.size());
      std::set<int64_t> predicted;
      for (const DocumentRun& run : token_runs(bin.forest, bin.trees, shard))
        for (const int64_t d : run.documents)
          for (int64_t i = 0; i < run.length; ++i) {
            const int64_t p = run.start + i * run.stride;
            const auto row = static_cast<size_t>(run.row + i);
            ++tokens[{d, p}];
            RC_ASSERT(batch.tokens[row] == texts.view().document(d)[p]);
            RC_ASSERT(batch.positions[row] == p);
          }
      for (const DocumentRun& run : prediction_runs(bin.forest, bin.trees, shard))
        for (const int64_t d : run.documents)
          for (int64_t i = 0; i < run.length; ++i) {
            const int64_t p = run.start + i * run.stride;
            auto row = static_cast<size_t>(run.row + i);
            ++predictions[{d, p}];
            RC_ASSERT(batch.targets[row] == texts.view().document(d)[static_cast<size_t>(p) + 1]);
            predicted.insert(static_cast<int64_t>(row));
            if (row >= batch.tokens.size())
              row = static_cast<size_t>(batch.again[row - batch.tokens.size()]);
            RC_ASSERT(batch.tokens[row] == texts.view().document(d)[p]);
            RC_ASSERT(batch.positions[row] == p);
          }
      for (size_t row = 0; row < batch.targets.size(); ++row)
        RC_ASSERT((batch.targets[row] != no_target) ==
                  predicted.contains(static_cast<int64_t>(row)));
    }
    for (int64_t d = 0; d < texts.view().size(); ++d)
      for (int64_t p = 0; p < texts.view().length(d); ++p) {
        RC_ASSERT((tokens[{d, p}]) == 1);
        RC_ASSERT((predictions[{d, p}]) == (p + 1 < texts.view().length(d) ? 1 : 0));
      }
  }));
}

/// Attention of a tree is that of its documents; gradients of a shared row are sums over the
/// documents that have it.
TEST(SharedPrefixes, AttentionAndItsGradientsAreThoseOfSeparateDocuments) {
  const Texts texts = example();
  const Bin bin(texts, {3, 0}, 1);
  const HeadShape heads{2, 1, 4, 0.5F};
  const auto width = [&](bool query) {
    return query ? heads.heads * heads.head_dim : heads.head_dim;
  };
  const auto at = places(bin);
  const int64_t stored = bin.forest.tokens(0), all = texts.offsets.back();
  using Values = std::vector<double>;
  const auto drawn = [](TokenTensor tensor, int64_t count) {
    std::vector<float> row(count);
    fill_token_row({3, tensor}, 0, row);
    return Values(row.begin(), row.end());
  };
  // Documents get the rows of the tree; their gradients of the output are all different.
  const auto of_documents = [&](const Values& tree, int64_t row) {
    Values values;
    for (int64_t d = 0; d < texts.view().size(); ++d)
      for (int64_t p = 0; p < texts.view().length(d); ++p) {
        const auto first = tree.begin() + at.at({d, p}).second * row;
        values.insert(values.end(), first, first + row);
      }
    return values;
  };
  const auto summed = [&](const Values& separate, int64_t row) {
    Values sums(static_cast<size_t>(stored * row), 0);
    for (const auto& [key, place] : at)
      for (int64_t i = 0; i < row; ++i)
        sums[place.second * row + i] += separate[(texts.offsets[key.first] + key.second) * row + i];
    return sums;
  };
  const auto near = [](const Values& a, const Values& b) {
    ASSERT_EQ(a.size(), b.size());
    for (size_t i = 0; i < a.size(); ++i) EXPECT_NEAR(a[i], b[i], 1e-12) << i;
  };
  const Values q = drawn(TokenTensor::q, stored * width(true)),
               k = drawn(TokenTensor::k, stored * width(false)),
               v = drawn(TokenTensor::v, stored * width(false)),
               separate_d_out = drawn(TokenTensor::d_out, all * width(true));
  const Values d_out = summed(separate_d_out, width(true)), sq = of_documents(q, width(true)),
               sk = of_documents(k, width(false)), sv = of_documents(v, width(false));
  const std::vector<int64_t> tree{0, stored};
  const AttentionResults one = attention_reference(
      AttentionInputs<double>{heads, mask_of(bin.forest, bin.trees), tree, q, k, v, d_out});
  const AttentionResults many = attention_reference(
      AttentionInputs<double>{heads, MaskRule(), texts.offsets, sq, sk, sv, separate_d_out});
  near(of_documents(one.out, width(true)), many.out);
  near(of_documents(one.lse, heads.heads), many.lse);
  near(one.d_q, summed(many.d_q, width(true)));
  near(one.d_k, summed(many.d_k, width(false)));
  near(one.d_v, summed(many.d_v, width(false)));
}

}  // namespace GYRE_FILE
}  // namespace gyre
