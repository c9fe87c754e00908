// Attention problems read by all ranks, and results written from rows that are dealt in any way.

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <numeric>

#include "errors.hpp"
#include "io/compare.hpp"
#include "io/schemas/attention_file.hpp"
#include "io_files.hpp"
#include "mpi_test.hpp"

namespace gyre {
namespace GYRE_FILE {

using test::expect_error;
using test::input;
using test::on_root;
using test::SharedFolder;
using test::world;

TEST(AttentionFile, ReadsTheCausalProblem) {
  const AttentionFile a = read_attention_file(world(), input("attention_causal.h5"));
  EXPECT_EQ(a.offsets, (std::vector<int64_t>{0, 33, 34, 34, 42, 53, 55}));
  EXPECT_EQ(a.heads, 4);
  EXPECT_EQ(a.kv_heads, 2);
  EXPECT_EQ(a.head_dim, 16);
  EXPECT_EQ(a.mask, "causal");
  EXPECT_EQ(a.window, 0);
  EXPECT_EQ(a.scale, 0.25);
  EXPECT_EQ(std::ssize(a.q), 55 * 4 * 16);
  EXPECT_EQ(std::ssize(a.v), 55 * 2 * 16);
  EXPECT_TRUE(a.sinks.empty());
  ASSERT_TRUE(a.reference.has_value());
  EXPECT_EQ(a.reference->generator, "inputs/make_attention.py");
  EXPECT_TRUE(a.reference->d_sinks.empty());
  // Token 33 is a document of its own: it sees itself alone.
  for (int64_t h = 0; h < 4; ++h) {
    double score = 0;
    for (int64_t d = 0; d < 16; ++d) {
      const auto query = static_cast<size_t>((33 * 4 + h) * 16 + d);
      const auto key = static_cast<size_t>((33 * 2 + h / 2) * 16 + d);
      score += 0.25 * static_cast<double>(a.q[query]) * static_cast<double>(a.k[key]);
      EXPECT_NEAR(a.reference->out[query], static_cast<double>(a.v[key]), 1e-15);
      EXPECT_NEAR(a.reference->d_q[query], 0, 1e-15);
    }
    EXPECT_NEAR(a.reference->lse[33 * 4 + h], score, 1e-14);
  }
}

TEST(AttentionFile, ReadsWindowAndSinks) {
  const AttentionFile a = read_attention_file(world(), input("attention_window.h5"));
  EXPECT_EQ(a.window, 16);
  EXPECT_EQ(a.heads, 8);
  EXPECT_EQ(a.kv_heads, 1);
  EXPECT_EQ(std::ssize(a.sinks), 8);
  ASSERT_TRUE(a.reference.has_value());
  ASSERT_EQ(std::ssize(a.reference->d_sinks), 8);
  // Token 0 sees itself and the sink: its share of the sink's gradient can be had by hand.
  const double scale = a.scale;
  double score = 0;
  for (size_t d = 0; d < 8; ++d)
    score += scale * static_cast<double>(a.q[d]) * static_cast<double>(a.k[d]);
  const double lse = std::log(std::exp(score) + std::exp(static_cast<double>(a.sinks[0])));
  EXPECT_NEAR(a.reference->lse[0], lse, 1e-13);
}

/// A valid problem of 3 tokens, 2 heads on 1 and 2 elements, with everything optional; a test names
/// the fields that differ.
struct Draft {
  std::string schema = attention_schema, mask = "causal";
  int64_t window = 2;
  double scale = 0.5;
  std::vector<int64_t> offsets{0, 1, 3};
  h5::Shape q{3, 2, 2}, k{3, 1, 2}, v{3, 1, 2}, d_out{3, 2, 2}, sinks{2};
  h5::Shape out{3, 2, 2}, lse{3, 2}, d_sinks{2};
  h5::Shape k_shared{}, d_k_shared{};  // absent
  bool integer_q = false;
  float value = 0.5F;  // of every input
  double answer = 0.25;
  std::string omit{};
  std::vector<int64_t> regions{};
  bool reference = true;
  std::vector<int64_t> query_offsets{};  // absent
  std::vector<int32_t> selected{};       // absent; else two keys of each query
};

void write_draft(const std::string& path, const Draft& draft) {
  h5::File file = h5::File::create(path);
  write_schema(file, draft.schema, {});
  file.create_group("/attention");
  file.write_attribute("/attention", "mask", draft.mask);
  file.write_attribute("/attention", "window", draft.window);
  file.write_attribute("/attention", "scale", draft.scale);
  file.write_dataset("/attention/offsets", std::span<const int64_t>(draft.offsets));
  if (!draft.query_offsets.empty())
    file.write_dataset("/attention/query_offsets", std::span<const int64_t>(draft.query_offsets));
  const auto put = [&](const std::string& dataset, const h5::Shape& shape, auto value) {
    if (dataset != draft.omit) test::write_filled(file, dataset, shape, value);
  };
  if (draft.integer_q)
    put("/attention/q", draft.q, int32_t{1});
  else
    put("/attention/q", draft.q, draft.value);
  put("/attention/k", draft.k, draft.value);
  put("/attention/v", draft.v, draft.value);
  put("/attention/d_out", draft.d_out, draft.value);
  put("/attention/sinks", draft.sinks, draft.value);
  if (!draft.k_shared.empty()) put("/attention/k_shared", draft.k_shared, draft.value);
  if (!draft.regions.empty())
    file.write_dataset("/attention/regions", std::span<const int64_t>(draft.regions),
                       {std::ssize(draft.regions) / 7, 7});
  if (!draft.selected.empty())
    file.write_dataset("/attention/selected_keys", std::span<const int32_t>(draft.selected),
                       {std::ssize(draft.selected) / 2, 2});
  if (draft.reference) {
    file.create_group("/reference");
    file.write_attribute("/reference", "generator", std::string("test"));
    put("/reference/out", draft.out, draft.answer);
    put("/reference/lse", draft.lse, draft.answer);
    put("/reference/d_q", draft.out, draft.answer);
    put("/reference/d_k", draft.k, draft.answer);
    put("/reference/d_v", draft.v, draft.answer);
    put("/reference/d_sinks", draft.d_sinks, draft.answer);
    if (!draft.d_k_shared.empty()) put("/reference/d_k_shared", draft.d_k_shared, draft.answer);
  }
  file.close();
}

/// Reads the file of a draft. Collective.
AttentionFile read_draft(const SharedFolder& folder, const Draft& draft) {
  on_root([&] { write_draft(folder.file("a.h5"), draft); });
  return read_attention_file(world(), folder.file("a.h5"));
}

TEST(AttentionFile, ReadsGoodDrafts) {
  const SharedFolder folder;
  const AttentionFile whole = read_draft(folder, {});
  EXPECT_EQ(whole.window, 2);
  EXPECT_EQ(whole.tokens(), 3);
  EXPECT_EQ(whole.sinks, (std::vector<float>{0.5, 0.5}));
  EXPECT_EQ(whole.reference->lse, std::vector<double>(6, 0.25));
  const AttentionFile bare = read_draft(folder, {.omit = "/attention/sinks", .reference = false});
  EXPECT_FALSE(bare.reference.has_value());
  EXPECT_TRUE(bare.sinks.empty());
  EXPECT_EQ(bare.d_out, std::vector<float>(12, 0.5F));
  const AttentionFile none = read_draft(folder, {.mask = "full",
                                                 .window = 0,
                                                 .offsets = {0},
                                                 .q = {0, 2, 2},
                                                 .k = {0, 1, 2},
                                                 .v = {0, 1, 2},
                                                 .d_out = {0, 2, 2},
                                                 .out = {0, 2, 2},
                                                 .lse = {0, 2}});
  EXPECT_EQ(none.mask, "full");
  EXPECT_EQ(none.tokens(), 0);
  EXPECT_EQ(none.heads, 2);
  EXPECT_TRUE(none.q.empty());
}

TEST(AttentionFile, EveryHeadOfKeysEndsWithTheSharedElements) {
  const AttentionFile a =
      read_attention_file(world(), input("golden/attention_keys_shared_groups.h5"));
  EXPECT_EQ(a.shared_key_dim, 2);
  ASSERT_EQ(std::ssize(a.k), a.tokens() * 2 * 6);
  ASSERT_EQ(std::ssize(a.reference->d_k), a.tokens() * 2 * 4);
  ASSERT_EQ(std::ssize(a.reference->d_k_shared), a.tokens() * 2);
  const h5::File file =
      open_schema_file(world(), input("golden/attention_keys_shared_groups.h5"), attention_schema);
  const auto own = file.dataset("/attention/k").read_all<float>();
  const auto shared = file.dataset("/attention/k_shared").read_all<float>();
  for (int64_t t = 0; t < a.tokens(); ++t)
    for (int64_t h = 0; h < 2; ++h)
      for (int64_t i = 0; i < 6; ++i)
        EXPECT_EQ(a.k[(t * 2 + h) * 6 + i],
                  i < 4 ? own[(t * 2 + h) * 4 + i] : shared[t * 2 + i - 4]);
}

TEST(AttentionFile, ReadsQueriesOfTheLastTokens) {
  const AttentionFile a = read_attention_file(world(), input("golden/attention_last_queries.h5"));
  EXPECT_EQ(a.offsets, (std::vector<int64_t>{0, 40, 49, 79, 85}));
  EXPECT_EQ(a.query_offsets, (std::vector<int64_t>{0, 13, 18, 48, 48}));
  EXPECT_EQ(std::ssize(a.q), 48 * 4 * 8);
  EXPECT_EQ(std::ssize(a.reference->lse), 48 * 4);
  EXPECT_EQ(a.query_row(27), 0);
  EXPECT_EQ(a.query_row(39), 12);
  EXPECT_EQ(a.query_row(44), 13);
  EXPECT_EQ(a.query_row(78), 47);
}

TEST(AttentionFile, ReadsRegions) {
  const AttentionFile a = read_attention_file(world(), input("attention_regions.h5"));
  EXPECT_EQ(a.mask, "regions");
  EXPECT_EQ(std::vector<int64_t>(a.regions.begin() + 21, a.regions.begin() + 28),
            (std::vector<int64_t>{0, 20, 34, 20, 34, 1, 5}));
  EXPECT_EQ(std::ssize(a.regions), 8 * attention_region_columns);
}

TEST(AttentionFile, ReadsSelectedKeys) {
  const AttentionFile a = read_attention_file(world(), input("golden/attention_selected.h5"));
  EXPECT_EQ(a.mask, "selected");
  EXPECT_EQ(a.selected, 6);
  ASSERT_EQ(std::ssize(a.selected_keys), 53 * 6);
  EXPECT_EQ(a.selected_keys[0], 0);  // the first query has one key
  EXPECT_EQ(a.selected_keys[1], -1);
  EXPECT_EQ(a.queries_of(2), 0);
  EXPECT_EQ(a.queries_of(3), 11);
}

TEST(AttentionFile, RefusesWrongFiles) {
  const SharedFolder folder;
  struct Case {
    std::vector<std::string> problems;
    Draft draft;
  };
  std::vector<Case> cases{
      {{"/attention/regions[1] is of document 2; there are 2",
        "/attention/regions[1] is of kind 4; it must be 0, full, 1, causal, 2, inverse causal, or "
        "3, both"},
       {.mask = "regions", .window = 0, .regions = {0, 0, 1, 0, 1, 0, 0, 2, 0, 1, 0, 1, 4, 0}}},
      {{"/attention/regions is there, but mask of '/attention' is 'causal'"},
       {.regions = std::vector<int64_t>(7, 0)}},
      {{"there is no dataset '/attention/regions'; it must be integer [any, 7]"},
       {.mask = "regions", .window = 0}},
      {{"mask of '/attention' is 'diagonal'; it must be causal, full, regions or selected"},
       {.mask = "diagonal"}},
      {{"window of '/attention' is 2, but only a causal mask has one; it must be 0"},
       {.mask = "full"}},
      {{"window of '/attention' is -1; it must be 0, none, or the number of keys",
        "scale of '/attention' is 0; it must be from 1.18e-38 to 3.4e+38, as 1 / sqrt(head_dim)"},
       {.window = -1, .scale = 0}},
      {{"there is no dataset '/attention/v'; it must be real [3, 1, any]"},
       {.omit = "/attention/v"}},
      {{"dataset '/attention/k' is float32 [2, 1, 2]; it must be real [3, any, 2]",
        "dataset '/reference/d_k' is float64 [2, 1, 2]; it must be real [3, any, 2]"},
       {.k = {2, 1, 2}}},
      {{"/attention/q has 2 heads and /attention/k has 3; the former must be a multiple of the "
        "latter"},
       {.k = {3, 3, 2}, .v = {3, 3, 2}}},
      {{"dataset '/attention/sinks' is float32 [3]; it must be real [2]"}, {.sinks = {3}}},
      {{"dataset '/attention/q' is int32 [3, 2, 2]; it must be real [any, any, any]"},
       {.integer_q = true}},
      {{"dataset '/reference/lse' is float64 [2, 3]; it must be real [3, 2]"},
       {.lse = {2, 3}, .omit = "/reference/d_sinks"}},
      {{"/attention/offsets[2] is 0, less than /attention/offsets[1] = 1; offsets must not "
        "decrease"},
       {.offsets = {0, 1, 0, 3}}},
      {{"/attention/offsets[2], the last, is 4; it must be 3, the rows of /attention/k"},
       {.offsets = {0, 1, 4}}}};
  // Queries at 0 of document 0, and at 0 and 1 of document 1.
  const auto select = [&](const std::string& problem, const std::vector<int32_t>& selected) {
    cases.push_back({{"/attention/selected_keys" + problem},
                     {.mask = "selected", .window = 0, .selected = selected}});
  };
  const std::string up_to =
      "it must be -1, no key, or the position of a key up to its query, which is at ";
  select("[0, 0] is 1; " + up_to + "0 of document 0", {1, -1, 0, -1, 1, 0});
  select("[2, 1] is 2; " + up_to + "1 of document 1", {0, -1, 0, -1, 1, 2});
  select("[1, 1] is -2; " + up_to + "0 of document 1", {0, -1, 0, -2, 1, 0});
  select("[2, 1] is 0; keys must come before -1, no key", {0, -1, 0, -1, -1, 0});
  select("[2, 1] is 1; a query selects a key once", {0, -1, 0, -1, 1, 1});
  cases.push_back(
      {{"dataset '/attention/selected_keys' is int32 [2, 2]; it must be integer [3, any]"},
       {.mask = "selected", .window = 0, .selected = {0, -1, 0, -1}}});
  cases.push_back({{"/attention/selected_keys is there, but mask of '/attention' is 'causal'"},
                   {.selected = {0, -1, 0, -1, 1, 0}}});
  cases.push_back({{"there is no dataset '/attention/selected_keys'; it must be integer [3, any]"},
                   {.mask = "selected", .window = 0}});
  const h5::Shape two{2, 2, 2};
  const Draft two_queries{
      .q = two, .d_out = two, .out = two, .lse = {2, 2}, .query_offsets = {0, 1, 2}};
  Draft wrong = two_queries;
  wrong.query_offsets = {0, 2, 2};
  cases.push_back(
      {{"/attention/query_offsets gives document 0 2 queries; it has 1 tokens"}, wrong});
  wrong.query_offsets = {0, 2};
  cases.push_back(
      {{"/attention/query_offsets has 2 elements; it must have 3, as /attention/offsets"}, wrong});
  wrong.query_offsets = {0, 0, 1};
  cases.push_back({{"/attention/query_offsets[2], the last, is 1; it must be 2, the rows of "
                    "/attention/q"},
                   wrong});
  const h5::Shape none{0, 2, 2};
  cases.push_back(
      {{"/attention/query_offsets gives no document a query"},
       {.q = none, .d_out = none, .out = none, .lse = {0, 2}, .query_offsets = {0, 0, 0}}});
  cases.push_back({{"/attention/k_shared has 2 elements a token; heads of /attention/q have 2, of "
                    "which 1 to 1 can be shared"},
                   {.k_shared = {3, 2}}});
  cases.push_back({{"dataset '/attention/k_shared' is float32 [2, 1]; it must be real [3, any]"},
                   {.k_shared = {2, 1}}});
  cases.push_back({{"dataset '/attention/k' is float32 [3, 1, 2]; it must be real [3, any, 1]",
                    "dataset '/reference/d_k' is float64 [3, 1, 2]; it must be real [3, any, 1]"},
                   {.k_shared = {3, 1}}});
  cases.push_back({{"dataset '/reference/d_k_shared' is float64 [3, 2]; it must be real [3, 1]"},
                   {.k = {3, 1, 1}, .k_shared = {3, 1}, .d_k_shared = {3, 2}}});
  cases.push_back({{"/reference/d_k_shared is there, and '/attention/k_shared', which it is of, is "
                    "not"},
                   {.d_k_shared = {3, 1}}});
  for (const double scale : {HUGE_VAL, 1e300, 1e-39, -0.5, std::nan("")})
    cases.push_back({{fmt::format("scale of '/attention' is {}; it must be from 1.18e-38 to "
                                  "3.4e+38, as 1 / sqrt(head_dim)",
                                  scale)},
                     {.scale = scale}});
  cases.push_back({{}, {.value = NAN}});
  for (const char* name : {"q", "k", "v", "d_out", "sinks"})
    cases.back().problems.push_back(
        fmt::format("/attention/{}[0] is nan; it must be finite", name));
  for (const double answer : {-HUGE_VAL, HUGE_VAL}) {
    cases.push_back({{}, {.answer = answer}});
    for (const char* name : {"out", "lse", "d_q", "d_k", "d_v", "d_sinks"})
      if (const bool is_lse = name[0] == 'l'; !is_lse || answer > 0)
        cases.back().problems.push_back(fmt::format("/reference/{}[0] is {}; it must be finite{}",
                                                    name, answer, is_lse ? " or -inf" : ""));
  }
  for (const Case& c : cases) {
    std::string message =
        fmt::format("'{}' breaks the schema gyre/attention version 1:", folder.file("a.h5"));
    for (const std::string& problem : c.problems) message += "\n  - " + problem;
    EXPECT_EQ(test::agreed_message([&] { read_draft(folder, c.draft); }), message);
  }
}

TEST(AttentionFile, RefusesOtherAndDamagedFiles) {
  expect_error(ExitCode::usage, "is of the kind 'gyre/bshd'; 'gyre/attention' is needed",
               [] { read_attention_file(world(), input("bshd_tiny.h5")); });
  const SharedFolder folder;
  on_root([&] { test::copy_truncated(input("attention_causal.h5"), folder.file("cut.h5"), 1000); });
  expect_error(ExitCode::runtime, folder.file("cut.h5"),
               [&] { read_attention_file(world(), folder.file("cut.h5")); });
  const AttentionFile a = read_attention_file(world(), input("attention_causal.h5"));
  on_root([&] {
    const std::string pattern(reinterpret_cast<const char*>(a.k.data()), 16);
    test::copy_damaged(input("attention_causal.h5"), folder.file("bad.h5"), pattern);
  });
  expect_error(ExitCode::runtime, "/attention/k",
               [&] { read_attention_file(world(), folder.file("bad.h5")); });
}

constexpr int64_t heads = 3, kv_heads = 1, dim = 2;

float value_of(int64_t token, int64_t column, int array) {
  return static_cast<float>(1000 * token + 10 * column + array);
}

/// Rows of some tokens with values that tell where they belong; NaN in padding.
class Rows {
 public:
  explicit Rows(std::vector<int64_t> tokens) {
    rows_.tokens = rows_.queries = std::move(tokens);
    rows_.out = make(0, heads * dim);
    rows_.lse = make(1, heads);
    rows_.d_q = make(2, heads * dim);
    rows_.d_k = make(3, kv_heads * dim);
    rows_.d_v = make(4, kv_heads * dim);
  }
  const AttentionResultRows& rows() const { return rows_; }

 private:
  MatrixView<const float> make(int array, int64_t width) {
    const int64_t stride = width + 3;
    std::vector<float>& values = values_[array];
    values.assign(std::ssize(rows_.tokens) * stride, NAN);
    for (int64_t r = 0; r < std::ssize(rows_.tokens); ++r)
      for (int64_t c = 0; c < width; ++c)
        if (const int64_t token = rows_.tokens[r]; token >= 0)
          values[r * stride + c] = value_of(token, c, array);
    return {values.data(), std::ssize(rows_.tokens), width, stride};
  }
  std::array<std::vector<float>, 5> values_;
  AttentionResultRows rows_;
};

AttentionResultsHeader header_for(int64_t tokens, bool gradients = true) {
  AttentionResultsHeader header;
  header.heads = heads, header.kv_heads = kv_heads;
  header.head_dim = header.v_head_dim = dim;
  header.offsets = {0, tokens / 2, tokens};
  header.gradients = gradients;
  if (gradients) header.d_sinks = {1, 2, 3};
  header.input_sha256 = std::string(64, 'a');
  header.provenance = {{"generator", "test"}};
  return header;
}

void save(const std::string& path, const AttentionResultsHeader& header, const Rows& mine) {
  OutputFile output(world(), path);
  write_attention_results(output, header, mine.rows());
  output.commit();
}

/// Expects every row in its place.
void expect_complete(const std::string& path, int64_t tokens, bool gradients = true) {
  const h5::File file = open_schema_file(world(), path, attention_results_schema);
  EXPECT_EQ(std::get<std::string>(file.attribute("/results", "input_sha256")),
            std::string(64, 'a'));
  int array = 0;
  for (const char* name : {"out", "lse", "d_q", "d_k", "d_v"}) {
    const std::string dataset = std::string("/results/") + name;
    EXPECT_EQ(file.has_dataset(dataset), array < 2 || gradients) << dataset;
    if (!file.has_dataset(dataset)) continue;
    const auto values = file.dataset(dataset).read_all<float>();
    const int64_t width = name == std::string("lse") ? heads : array < 3 ? heads * dim : dim;
    ASSERT_EQ(std::ssize(values), tokens * width) << dataset;
    for (int64_t i = 0; i < std::ssize(values); ++i)
      ASSERT_EQ(values[i], value_of(i / width, i % width, array)) << dataset << " element " << i;
    ++array;
  }
  EXPECT_EQ(file.has_dataset("/results/d_sinks"), gradients);
}

/// Tokens of this rank when token t goes to rank owner(t), backwards, with padding between.
std::vector<int64_t> dealt(int64_t tokens, const std::function<int64_t(int64_t)>& owner) {
  std::vector<int64_t> mine;
  for (int64_t t = tokens - 1; t >= 0; --t) {
    if (owner(t) != world().rank()) continue;
    mine.push_back(t);
    if (t % 5 == 0) mine.push_back(-1);
  }
  return mine;
}

TEST(AttentionResults, RowsFromAnyRank) {
  const SharedFolder folder;
  const int64_t ranks = world().size(), tokens = 103;
  const std::vector<std::function<int64_t(int64_t)>> owners = {
      [&](int64_t t) { return t % ranks; },
      [&](int64_t t) { return (t * ranks / tokens + 1) % ranks; },
      [&](int64_t) { return ranks - 1; },
      [&](int64_t t) { return (t * t) % ranks; },
  };
  for (const auto& owner : owners) {
    save(folder.file("r.h5"), header_for(tokens), Rows(dealt(tokens, owner)));
    expect_complete(folder.file("r.h5"), tokens);
  }
}

TEST(AttentionResults, FewerTokensThanRanksAndNoGradients) {
  const SharedFolder folder;
  for (const int64_t tokens : {0, 1, 3}) {
    const Rows mine(dealt(tokens, [](int64_t) { return 0; }));
    save(folder.file("r.h5"), header_for(tokens, false), mine);
    expect_complete(folder.file("r.h5"), tokens, false);
  }
}

TEST(AttentionResults, EveryTokenOnce) {
  const SharedFolder folder;
  const auto refused = [&](const std::string& part, std::vector<int64_t> on_last_rank) {
    const bool last = world().rank() == world().size() - 1;
    const Rows mine(last ? std::move(on_last_rank) : std::vector<int64_t>());
    expect_error(ExitCode::runtime, part, [&] { save(folder.file("r.h5"), header_for(4), mine); });
    EXPECT_FALSE(std::filesystem::exists(folder.file("r.h5")));
  };
  refused("token 2 of 4 comes from no rank", {0, 1, 3});
  refused("token 1 comes from two rows", {0, 1, 2, 1, 3});
  refused("row 2 holds token 4, but there are 4", {0, 1, 4, 2, 3});
  AttentionResultsHeader other = header_for(0);
  other.v_head_dim = 5;
  expect_error(ExitCode::runtime, "/results/out is [0, 6]; it must be [0, 15]",
               [&] { save(folder.file("r.h5"), other, Rows({})); });
}

TEST(AttentionResults, CompareWithTheReferenceTensorByTensor) {
  const SharedFolder folder;
  const AttentionFile a = read_attention_file(world(), input("attention_window.h5"));
  const AttentionReference& wanted = *a.reference;
  const auto as_float = [](const std::vector<double>& values) {
    return std::vector<float>(values.begin(), values.end());
  };
  const std::vector<float> out = as_float(wanted.out), lse = as_float(wanted.lse),
                           d_q = as_float(wanted.d_q), d_k = as_float(wanted.d_k),
                           d_v = as_float(wanted.d_v);
  AttentionResultRows mine;
  const int64_t rows = world().rank() == 0 ? a.tokens() : 0;
  mine.tokens.resize(rows);
  std::iota(mine.tokens.begin(), mine.tokens.end(), 0);
  mine.queries = mine.tokens;
  const int64_t width = a.heads * a.head_dim, kv_width = a.kv_heads * a.head_dim;
  mine.out = {out.data(), rows, width}, mine.lse = {lse.data(), rows, a.heads};
  mine.d_q = {d_q.data(), rows, width};
  mine.d_k = {d_k.data(), rows, kv_width}, mine.d_v = {d_v.data(), rows, kv_width};
  AttentionResultsHeader header;
  header.heads = a.heads, header.kv_heads = a.kv_heads;
  header.head_dim = a.head_dim, header.v_head_dim = a.v_head_dim;
  header.offsets = a.offsets, header.gradients = true, header.d_sinks = wanted.d_sinks;
  {
    OutputFile output(world(), folder.file("r.h5"));
    write_attention_results(output, header, mine);
    output.commit();
  }
  on_root([&] {
    const auto tensors = compare_files(folder.file("r.h5") + ":/results",
                                       input("attention_window.h5") + ":/reference",
                                       {.rtol = 1e-7, .atol = 1e-12, .common_only = true});
    EXPECT_EQ(tensors.size(), 6U);
    for (const TensorComparison& tensor : tensors) {
      EXPECT_EQ(tensor.match, Match::same) << tensor.path << ": " << tensor.max_error;
    }
  });
}

}  // namespace GYRE_FILE
}  // namespace gyre
