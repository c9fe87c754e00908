// Log-probability problems read by all ranks, and results written from blocks of tokens.

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>

#include "apps/logprobs/registry.hpp"
#include "errors.hpp"
#include "io/compare.hpp"
#include "io/schemas/logprobs_file.hpp"
#include "io_files.hpp"
#include "mpi_test.hpp"

namespace gyre {
namespace GYRE_FILE {

using test::expect_error;
using test::input;
using test::on_root;
using test::SharedFolder;
using test::world;
using test::write_filled;

double answer(const LogprobsFile& f, const char* name, size_t i) {
  return f.reference->arrays.at(name).at(i);
}

TEST(LogprobsFile, ReadsTheGoldenProblem) {
  const LogprobsFile f =
      read_logprobs_file(world(), input("logprobs_golden.h5"), logprobs_arrays());
  EXPECT_EQ(f.vocab_size, 64);
  EXPECT_EQ(f.columns, 64);
  EXPECT_EQ(f.picks, 4);
  EXPECT_EQ(f.top_k, 10);
  EXPECT_EQ(f.top_p, 0.9);
  EXPECT_EQ(f.temperature, 1);
  EXPECT_EQ(f.offsets, (std::vector<int64_t>{0, 8, 16}));
  EXPECT_EQ(f.longest(), 8);
  EXPECT_EQ(f.floats("logits").at(57), 6);
  EXPECT_EQ(f.ints("targets").at(9), (7 + 13 + 5) % 64);
  ASSERT_TRUE(f.reference.has_value());
  EXPECT_EQ(f.reference->generator, "inputs/make_logprobs.py");
  EXPECT_NEAR(answer(f, "logprob", 0), -3.123163688, 1e-9);
  EXPECT_NEAR(answer(f, "entropy", 0), 2.643832576, 1e-9);
  EXPECT_NEAR(answer(f, "soft_cross_entropy", 0), 8.344218829, 1e-9);
  EXPECT_NEAR(answer(f, "next_token_logprob", 0), -11.873163688, 1e-9);
  EXPECT_NEAR(answer(f, "gathered", 1), -4.498163688, 1e-9);
  EXPECT_EQ(answer(f, "top_ids", 0), 57);
  EXPECT_EQ(answer(f, "top_values", 1), 5.875);
  EXPECT_EQ(std::ssize(f.reference->arrays.at("d_filtered_logprob")), 16 * 64);
}

TEST(LogprobsFile, ReadsTies) {
  const LogprobsFile f = read_logprobs_file(world(), input("logprobs_ties.h5"), logprobs_arrays());
  EXPECT_EQ(f.vocab_size, 101);
  EXPECT_EQ(f.columns, 108);
  EXPECT_EQ(f.temperature, 2);
  EXPECT_EQ(f.ints("targets").at(0), -100);
  EXPECT_EQ(f.offsets, (std::vector<int64_t>{0, 1, 1, 7, 17}));
  EXPECT_EQ(answer(f, "filtered_logprob", 0), -HUGE_VAL);
  EXPECT_EQ(f.floats("logits").at(103), 3e38F);
}

TEST(LogprobsFile, ReadsHiddenStatesAndAHead) {
  const LogprobsFile f =
      read_logprobs_file(world(), input("logprobs_linear.h5"), logprobs_arrays());
  EXPECT_EQ(f.vocab_size, 61);
  EXPECT_EQ(f.hidden, 12);
  ASSERT_EQ(std::ssize(f.floats("hidden")), 14 * 12);
  ASSERT_EQ(std::ssize(f.floats("head")), 61 * 12);
  for (const auto& [t, v] : {std::pair<int64_t, int64_t>{0, 0}, {13, 60}, {7, 17}}) {
    float z = 0;
    for (int64_t d = 0; d < 12; ++d)
      z += f.floats("hidden").at(12 * t + d) * f.floats("head").at(12 * v + d);
    EXPECT_EQ(f.floats("logits").at(64 * t + v), z);
  }
  ASSERT_TRUE(f.reference.has_value());
  EXPECT_NEAR(answer(f, "linear_logprob", 4), answer(f, "logprob", 4), 1e-12);
  EXPECT_NEAR(answer(f, "linear_entropy", 5), std::log(61), 1e-12);
  EXPECT_EQ(std::ssize(f.reference->arrays.at("d_hidden")), 14 * 12);
  EXPECT_EQ(std::ssize(f.reference->arrays.at("d_head")), 61 * 12);
  EXPECT_FALSE(
      read_logprobs_file(world(), input("logprobs_ties.h5"), logprobs_arrays()).has("hidden"));
}

/// A small problem of 2 tokens, 3 ids in 4 columns, 2 ids a token; fields are what tests spoil.
struct Draft {
  int64_t vocab_size = 3, top_k = 0;
  double top_p = 1, temperature = 1;
  std::vector<int64_t> offsets{0, 2};
  h5::Shape logits{2, 4}, ids{2, 2};
  float logit = 0.5F;  // of token 1, id 0
  int32_t id = 1;
  float gradient = 1;
  double answer = 0;
  int64_t gathered_width = 2;
  h5::Shape hidden{}, head{}, of_all_ids{};  // empty: there is none
  float factor = 1;                          // all of their elements
  std::vector<std::string> linear_answers{};
  std::string omit{};
  std::vector<double> of_tokens{};      // temperature and min_p of tokens
  std::vector<int64_t> kept_offsets{};  // with kept_ids; empty: there are none
  std::vector<int32_t> kept_ids{};
  std::vector<int64_t> projection_offsets{};  // with the two below; empty: there are none
  std::vector<int32_t> projection_columns{};
  std::vector<float> projection_weights{};
  h5::Shape d_projected{};
  bool of_all_too = false;  // beside them, a temperature of all tokens
  std::vector<float> of_ids{},
      of_targets{};                // a teacher's log-probabilities; empty: there are none
  std::vector<int32_t> own_ids{};  // instead of `id` throughout
};

void write_answers(h5::File& file, const Draft& d) {
  file.create_group("/reference");
  file.write_attribute("/reference", "generator", std::string("test"));
  const auto answer = [&](const std::string& name, const h5::Shape& shape, double value = 0) {
    write_filled(file, "/reference/" + name, shape, value);
  };
  for (const char* name : {"logprob", "entropy", "soft_cross_entropy", "filtered_logprob"})
    answer(name, {2}, d.answer);
  for (const char* name :
       {"d_logprob", "d_entropy", "d_gathered", "d_soft_cross_entropy", "d_filtered_logprob"})
    answer(name, {2, 3});
  answer("gathered", {2, d.gathered_width});
  answer("top_values", {2, 2});
  answer("next_token_logprob", {1, 1});
  write_filled<int32_t>(file, "/reference/top_ids", {2, 2}, 0);
  for (const std::string& name : d.linear_answers)
    answer(name,
           name == "d_hidden" ? h5::Shape{2, 5}
           : name == "d_head" ? h5::Shape{3, 5}
                              : h5::Shape{2},
           d.answer);
}

void write_draft(const std::string& path, const Draft& d) {
  h5::File file = h5::File::create(path);
  write_schema(file, logprobs_schema, {});
  file.create_group("/logprobs");
  file.write_attribute("/logprobs", "vocab_size", d.vocab_size);
  file.write_attribute("/logprobs", "top_k", d.top_k);
  file.write_attribute("/logprobs", "top_p", d.top_p);
  if (d.of_tokens.empty() || d.of_all_too)
    file.write_attribute("/logprobs", "temperature", d.temperature);
  file.write_dataset("/logprobs/offsets", std::span<const int64_t>(d.offsets));
  std::vector<float> logits(h5::elements_of(d.logits), 0.5F);
  logits.at(3) = NAN;  // padding
  logits.at(d.logits[1]) = d.logit;
  const std::vector<float> d_value{1, d.gradient};
  for (const std::string name : {"logits", "teacher"})
    if (d.omit != name)
      file.write_dataset("/logprobs/" + name, std::span<const float>(logits), d.logits);
  write_filled<int32_t>(file, "/logprobs/targets", {2}, -100);
  if (!d.kept_offsets.empty())
    file.write_dataset("/logprobs/sampling_mask_offsets", std::span<const int64_t>(d.kept_offsets));
  if (!d.kept_ids.empty())
    file.write_dataset("/logprobs/sampling_mask_ids", std::span<const int32_t>(d.kept_ids));
  if (!d.projection_offsets.empty()) {
    const std::string name = "/logprobs/projection_";
    file.write_attribute("/logprobs", "projection_width", int64_t{4});
    file.write_dataset(name + "offsets", std::span<const int64_t>(d.projection_offsets));
    file.write_dataset(name + "columns", std::span<const int32_t>(d.projection_columns));
    file.write_dataset(name + "weights", std::span<const float>(d.projection_weights));
  }
  for (const char* name : {"temperature", "min_p"})
    if (!d.of_tokens.empty())
      file.write_dataset(fmt::format("/logprobs/{}", name), std::span<const double>(d.of_tokens));
  if (d.own_ids.empty())
    write_filled<int32_t>(file, "/logprobs/ids", d.ids, d.id);
  else
    file.write_dataset("/logprobs/ids", std::span<const int32_t>(d.own_ids), d.ids);
  if (!d.of_ids.empty())
    file.write_dataset("/logprobs/teacher_logprobs", std::span<const float>(d.of_ids),
                       {2, std::ssize(d.of_ids) / 2});
  if (!d.of_targets.empty())
    file.write_dataset("/logprobs/teacher_target_logprobs", std::span<const float>(d.of_targets));
  file.write_dataset("/logprobs/d_value", std::span<const float>(d_value));
  for (const auto& [name, shape] : {std::pair<const char*, h5::Shape>{"hidden", d.hidden},
                                    {"head", d.head},
                                    {"d_logprobs", d.of_all_ids},
                                    {"d_projected", d.d_projected}})
    if (!shape.empty()) write_filled(file, std::string("/logprobs/") + name, shape, d.factor);
  write_answers(file, d);
  file.close();
}

/// Reads the file of a draft. Collective.
LogprobsFile read_draft(const Draft& draft) {
  const SharedFolder folder;
  on_root([&] { write_draft(folder.file("f.h5"), draft); });
  return read_logprobs_file(world(), folder.file("f.h5"), logprobs_arrays());
}

TEST(LogprobsFile, TheDraftIsGood) {
  const LogprobsFile f = read_draft({});
  EXPECT_EQ(f.tokens(), 2);
  EXPECT_EQ(f.columns, 4);
  EXPECT_TRUE(std::isnan(f.floats("logits").at(3)));
}

TEST(LogprobsFile, WhatAFileMayLackHasADefault) {
  const SharedFolder folder;
  const std::string path = folder.file("f.h5");
  on_root([&] {
    h5::File file = h5::File::create(path);
    write_schema(file, logprobs_schema, {});
    file.create_group("/logprobs");
    file.write_attribute("/logprobs", "vocab_size", int64_t{3});
    write_filled(file, "/logprobs/logits", {2, 3}, 0.1);  // not exact in f32
    write_filled<int32_t>(file, "/logprobs/targets", {2}, 1);
    for (const char* name : {"/reference/logprob", "/reference/logprop"})
      write_filled(file, name, {2}, -1.0);
    file.close();
  });
  const LogprobsFile f = read_logprobs_file(world(), path, logprobs_arrays());
  EXPECT_EQ(f.offsets, (std::vector<int64_t>{0, 2}));
  EXPECT_EQ(f.floats("d_value"), (std::vector<float>{1, 1}));
  EXPECT_EQ(f.temperature, 1);
  EXPECT_EQ(f.top_k, 0);
  EXPECT_EQ(f.top_p, 1);
  EXPECT_EQ(f.picks, 0);
  EXPECT_FALSE(f.has("teacher") || f.has("teacher_values") || f.has("hidden"));
  EXPECT_EQ(f.rounded, std::set<std::string>{"/logprobs/logits"});
  ASSERT_TRUE(f.reference.has_value());
  EXPECT_EQ(f.reference->generator, "");
  EXPECT_EQ(f.reference->arrays.size(), 1U);
  EXPECT_EQ(f.reference->unknown,
            std::vector<std::string>{"/reference/logprop (did you mean logprob?)"});
}

TEST(LogprobsFile, ReadsTemperaturesAndFiltersOfTokens) {
  const LogprobsFile f =
      read_logprobs_file(world(), input("golden/logprobs_filter_of_tokens.h5"), logprobs_arrays());
  EXPECT_EQ(f.arrays.of<double>("temperature"),
            (std::vector<double>{1, 0.5, 2, 1, 1.5, 0.7, 1, 4}));
  EXPECT_EQ(f.ints("top_k"), (std::vector<int32_t>{0, 0, 9, 0, 12, 30, 37, 1}));
  EXPECT_EQ(f.arrays.of<double>("top_p").at(1), 0.6);
  EXPECT_EQ(f.arrays.of<double>("min_p").at(7), 1);
  EXPECT_EQ(f.temperature, 1);
}

TEST(LogprobsFile, ANumberOfAllTokensOrOneOfEach) {
  const SharedFolder folder;
  const std::string path = folder.file("f.h5");
  const auto write = [&](bool as_attribute) {
    on_root([&] { write_draft(path, {.of_tokens = {1, 0.5}, .of_all_too = as_attribute}); });
  };
  write(false);
  EXPECT_EQ(read_logprobs_file(world(), path, logprobs_arrays()).arrays.of<double>("min_p"),
            (std::vector<double>{1, 0.5}));
  write(true);
  expect_error(ExitCode::usage,
               "'/logprobs' has temperature as an attribute, of all tokens, and as the dataset "
               "/logprobs/temperature, of each; leave one out",
               [&] { read_logprobs_file(world(), path, logprobs_arrays()); });
}

TEST(LogprobsFile, IntegersOfAnyWidthThatFit) {
  const SharedFolder folder;
  const std::string path = folder.file("f.h5");
  const auto write = [&](int64_t target) {
    on_root([&] {
      h5::File file = h5::File::create(path);
      write_schema(file, logprobs_schema, {});
      file.create_group("/logprobs");
      file.write_attribute("/logprobs", "vocab_size", int64_t{3});
      write_filled(file, "/logprobs/logits", {2, 3}, 0.5F);
      const std::vector<int64_t> targets{1, target};
      file.write_dataset("/logprobs/targets", std::span<const int64_t>(targets));
      file.close();
    });
  };
  write(2);
  EXPECT_EQ(read_logprobs_file(world(), path, logprobs_arrays()).ints("targets"),
            (std::vector<int32_t>{1, 2}));
  write(int64_t{1} << 32);
  expect_error(ExitCode::usage, "element 1 is 4294967296, which does not fit 32 bits",
               [&] { read_logprobs_file(world(), path, logprobs_arrays()); });
}

/// A draft that is refused with these problems, each on a line of its own.
struct Refusal {
  std::vector<std::string> problems;
  Draft draft;
};
void expect_refusals(const std::vector<Refusal>& refusals) {
  for (const Refusal& c : refusals) {
    const std::string message = test::agreed_message([&] { read_draft(c.draft); });
    for (const std::string& problem : c.problems)
      EXPECT_NE(message.find("- " + problem), std::string::npos)
          << message << "\nexpected in it: " << problem;
    EXPECT_EQ(std::count(message.begin(), message.end(), '\n'), std::ssize(c.problems)) << message;
  }
}

const float inf = std::numeric_limits<float>::infinity();
const std::string no = "there is no dataset ";

TEST(LogprobsFile, RefusesWrongNumbersAndMasks) {
  expect_refusals(
      {{{"top_k of '/logprobs' is 4; it must be 0, none, or at most vocab_size, 3",
         "top_p of '/logprobs' is 0; it must be above 0 and at most 1, none",
         "temperature of '/logprobs' is -1; it must be from 1e-15 to 1e+30"},
        {.top_k = 4, .top_p = 0, .temperature = -1}},
       {{"/logprobs/temperature[1] is -0.5; it must be from 1e-15 to 1e+30",
         "/logprobs/min_p[1] is -0.5; it must be from 0, none, to 1"},
        {.of_tokens = {1, -0.5}}},
       {{no + "'/logprobs/sampling_mask_ids'; it must be integer [any]"},
        {.kept_offsets = {0, 1, 1}}},
       {{"dataset '/logprobs/sampling_mask_offsets' is int64 [2]; it must be integer [3]"},
        {.kept_offsets = {0, 1}, .kept_ids = {1}}},
       {{"/logprobs/sampling_mask_offsets[2], the last, is 1; it must be 2, "
         "/logprobs/sampling_mask_ids"},
        {.kept_offsets = {0, 1, 1}, .kept_ids = {1, 2}}},
       {{"/logprobs/sampling_mask_ids[1] is 3; ids are 0 to 2"},
        {.kept_offsets = {0, 1, 2}, .kept_ids = {1, 3}}},
       {{"/logprobs/sampling_mask_ids[2] is 1, which row 1 has already"},
        {.kept_offsets = {0, 1, 3}, .kept_ids = {1, 1, 1}}},
       {{"dataset '/logprobs/temperature' is float64 [3]; it must be real [2]",
         "dataset '/logprobs/min_p' is float64 [3]; it must be real [2]"},
        {.of_tokens = {1, 1, 1}}},
       {{no + "'/logprobs/logits'; it must be real [any, any]"}, {.omit = "logits"}},
       {{"dataset '/logprobs/ids' is int32 [3, 2]; it must be integer [2, any]"}, {.ids = {3, 2}}},
       {{"dataset '/reference/gathered' is float64 [2, 3]; it must be real [2, 2]"},
        {.gathered_width = 3}}});
}

TEST(LogprobsFile, RefusesWrongProjections) {
  // The projection maps 3 ids to 4 columns.
  expect_refusals(
      {{{"/logprobs/d_projected is there, and '/logprobs/projection_offsets', which it is of, "
         "is not"},
        {.d_projected = {2, 4}}},
       {{"dataset '/logprobs/projection_offsets' is int64 [3]; it must be integer [4]",
         "dataset '/logprobs/projection_weights' is float32 [1]; it must be real [2]",
         "dataset '/logprobs/d_projected' is float32 [2, 3]; it must be real [2, 4]"},
        {.projection_offsets = {0, 1, 2},
         .projection_columns = {0, 1},
         .projection_weights = {1},
         .d_projected = {2, 3}}},
       {{"/logprobs/projection_offsets[2] is 0, below the 1 before it; offsets never decrease",
         "/logprobs/d_projected[0] is nan; it must be finite"},
        {.factor = NAN,
         .projection_offsets = {0, 1, 0, 2},
         .projection_columns = {0, 1},
         .projection_weights = {1, 1},
         .d_projected = {2, 4}}},
       {{"/logprobs/projection_columns[1], of row 2, is 4; columns are 0 to 3"},
        {.projection_offsets = {0, 1, 1, 2},
         .projection_columns = {0, 4},
         .projection_weights = {1, 1}}},
       {{"/logprobs/projection_columns[1], of row 0, is 2, as entry 0 is; give one entry with "
         "both weights"},
        {.projection_offsets = {0, 2, 2, 2},
         .projection_columns = {2, 2},
         .projection_weights = {1, 1}}},
       {{"/logprobs/projection_weights[0], of row 1, is -1; a weight is finite and at least 0"},
        {.projection_offsets = {0, 0, 1, 1},
         .projection_columns = {2},
         .projection_weights = {-1}}}});
}

TEST(LogprobsFile, RefusesWrongTeachers) {
  // A file has both of a teacher's arrays or neither; the ids of a row differ.
  expect_refusals(
      {{{no + "'/logprobs/teacher_target_logprobs'; it must be real [2]"},
        {.of_ids = {-1, -1, -1, -1}, .own_ids = {0, 1, 1, 2}}},
       {{"dataset '/logprobs/teacher_logprobs' is float32 [2, 3]; it must be real [2, 2]"},
        {.of_ids = {-1, -1, -1, -1, -1, -1}, .of_targets = {-1, -1}}},
       {{"/logprobs/teacher_logprobs[2] is 0.5; a log-probability is at most 0",
         "/logprobs/teacher_target_logprobs[1] is nan; a log-probability is at most 0"},
        {.of_ids = {0, -1, 0.5, NAN}, .of_targets = {-inf, NAN}, .own_ids = {0, 1, 2, 1}}},
       {{"/logprobs/ids[1, 1] is 2, which the row has already; /logprobs/teacher_logprobs is "
         "of different ids"},
        {.of_ids = {-1, -1, -1, -1}, .of_targets = {-1, -1}, .own_ids = {0, 1, 2, 2}}}});
}

TEST(LogprobsFile, RefusesWrongHiddenStatesAndHeads) {
  // A file has hidden states and a head of one width, or neither and no answers of theirs.
  expect_refusals(
      {{{no + "'/logprobs/head'; it must be real [3, 5]"},
        {.hidden = {2, 5}, .linear_answers = {"linear_logprob", "linear_entropy", "d_hidden"}}},
       {{no + "'/logprobs/hidden'; it must be real [2, any]"}, {.head = {3, 5}}},
       {{"dataset '/logprobs/head' is float32 [4, 6]; it must be real [3, 5]"},
        {.hidden = {2, 5}, .head = {4, 6}}},
       {{"/logprobs/hidden is [2, 0]; a hidden state has at least one element",
         "dataset '/logprobs/head' is float32 [3, 5]; it must be real [3, 0]",
         "dataset '/reference/d_hidden' is float64 [2, 5]; it must be real [2, 0]"},
        {.hidden = {2, 0}, .head = {3, 5}, .linear_answers = {"d_hidden"}}},
       {{"/reference/d_head is there, and '/logprobs/hidden', which it is of, is not"},
        {.linear_answers = {"d_head"}}}});
}

TEST(LogprobsFile, RefusesWrongValues) {
  const std::string nan_logit = "[1, 0] is nan; it must be finite or -inf",
                    inf_logit = "[1, 0] is inf; it must be finite or -inf",
                    nan_answer = "[0] is nan; an answer is a number";
  expect_refusals(
      {{{"/logprobs/logits" + nan_logit, "/logprobs/teacher" + nan_logit}, {.logit = NAN}},
       {{"/logprobs/logits" + inf_logit, "/logprobs/teacher" + inf_logit}, {.logit = inf}},
       {{"/logprobs/ids[0] is 3; ids are 0 to 2"}, {.id = 3}},
       {{"/logprobs/d_value[1] is nan; it must be finite"}, {.gradient = NAN}},
       {{"/logprobs/d_value[1] is 2e+31; a gradient at a temperature of "}, {.gradient = 2e31F}},
       {{"/logprobs/d_logprobs[0] is nan; it must be finite"},
        {.of_all_ids = {2, 3}, .factor = NAN}},
       {{"/logprobs/offsets[1], the last, is 3; it must be 2, the rows of /logprobs/logits"},
        {.offsets = {0, 3}}},
       {{"/logprobs/hidden[0] is inf; it must be finite",
         "/logprobs/head[0] is inf; it must be finite"},
        {.hidden = {2, 5}, .head = {3, 5}, .factor = inf}},
       {{"/reference/entropy" + nan_answer, "/reference/filtered_logprob" + nan_answer,
         "/reference/logprob" + nan_answer, "/reference/soft_cross_entropy" + nan_answer},
        {.answer = NAN}}});
}

TEST(LogprobsFile, RefusesOtherAndDamagedFiles) {
  expect_error(ExitCode::usage, "is of the kind 'gyre/bshd'; 'gyre/logprobs' is needed",
               [] { read_logprobs_file(world(), input("bshd_tiny.h5"), logprobs_arrays()); });
  const SharedFolder folder;
  on_root([&] { test::copy_truncated(input("logprobs_ties.h5"), folder.file("cut.h5"), 1000); });
  expect_error(ExitCode::runtime, folder.file("cut.h5"),
               [&] { read_logprobs_file(world(), folder.file("cut.h5"), logprobs_arrays()); });
}

constexpr int64_t length = 3, columns = 6;

/// Tokens [begin, begin + count), last first, with values that tell where they belong; of a
/// gradient, columns [first, last).
std::vector<LogprobsPart> parts_of(int64_t tokens, int64_t begin, int64_t count, int64_t first = 0,
                                   int64_t last = columns) {
  LogprobsPart logprob{"logprob", {tokens}}, ids{"top_ids", {tokens, length}},
      gradient{"d_logprob", {tokens, columns}};
  ids.columns = length, ids.whole_numbers = true;
  gradient.first = first, gradient.columns = last - first;
  for (int64_t t = begin + count - 1; t >= begin; --t) {
    for (LogprobsPart* part : {&logprob, &ids, &gradient}) part->rows.push_back(t);
    logprob.values.push_back(static_cast<float>(10 * t + 1));
    for (int64_t k = 0; k < length; ++k) ids.integers.push_back(static_cast<int32_t>(200 * t + k));
    for (int64_t c = first; c < last; ++c)
      gradient.values.push_back(static_cast<float>(100 * t + c));
  }
  return {logprob, ids, gradient};
}

void save(const std::string& path, const std::vector<LogprobsPart>& mine) {
  OutputFile output(world(), path);
  write_logprobs_results(output,
                         {.vocab_size = 500,
                          .top_p = 0.5,
                          .input_sha256 = std::string(64, 'a'),
                          .provenance = {{"generator", "test"}}},
                         mine);
  output.commit();
}

TEST(LogprobsResults, RowsFromAnyRank) {
  const SharedFolder folder;
  const std::string path = folder.file("r.h5");
  const int64_t ranks = world().size();
  for (const int64_t tokens : {0, 1, 3, 29}) {
    // Backwards over the ranks.
    const int64_t block = ranks - 1 - world().rank();
    const int64_t begin = tokens * block / ranks, end = tokens * (block + 1) / ranks;
    save(path, parts_of(tokens, begin, end - begin));
    const h5::File file = open_schema_file(world(), path, logprobs_results_schema);
    EXPECT_EQ(std::get<std::string>(file.attribute("/results", "input_sha256")),
              std::string(64, 'a'));
    EXPECT_EQ(std::get<int64_t>(file.attribute("/results", "vocab_size")), 500);
    EXPECT_EQ(std::get<double>(file.attribute("/results", "top_p")), 0.5);
    const auto logprob = file.dataset("/results/logprob").read_all<float>();
    const auto ids = file.dataset("/results/top_ids").read_all<int32_t>();
    const auto gradient = file.dataset("/results/d_logprob").read_all<float>();
    ASSERT_EQ(file.dataset("/results/top_ids").shape(), (h5::Shape{tokens, length}));
    for (int64_t t = 0; t < tokens; ++t) {
      EXPECT_EQ(logprob[t], static_cast<float>(10 * t + 1));
      EXPECT_EQ(ids[t * length + 2], 200 * t + 2);
      EXPECT_EQ(gradient[t * columns + 5], static_cast<float>(100 * t + 5));
    }
  }
}

TEST(LogprobsResults, ColumnsFromAnyRank) {
  const SharedFolder folder;
  const std::string path = folder.file("r.h5");
  const int64_t rank = world().rank(), ranks = world().size(), tokens = 5;
  std::vector<LogprobsPart> mine =
      parts_of(tokens, 0, tokens, columns * rank / ranks, columns * (rank + 1) / ranks);
  for (size_t i = 0; i < 2 && rank > 0; ++i)
    mine[i].rows.clear(), mine[i].values.clear(), mine[i].integers.clear();
  mine[2].rows.push_back(-1);  // padding
  mine[2].values.resize(mine[2].values.size() + static_cast<size_t>(mine[2].columns), NAN);
  save(path, mine);
  const h5::File file = open_schema_file(world(), path, logprobs_results_schema);
  const auto gradient = file.dataset("/results/d_logprob").read_all<float>();
  for (int64_t i = 0; i < tokens * columns; ++i)
    EXPECT_EQ(gradient[i], static_cast<float>(100 * (i / columns) + i % columns));
}

TEST(LogprobsResults, EveryElementOnce) {
  const SharedFolder folder;
  const std::string path = folder.file("r.h5");
  const bool last = world().rank() == world().size() - 1;
  const auto refused = [&](const std::string& part, const std::vector<LogprobsPart>& mine) {
    expect_error(ExitCode::runtime, part, [&] { save(path, mine); });
    EXPECT_FALSE(std::filesystem::exists(path));
  };
  refused("logprob[0]: 0 elements come from ranks, of 1", parts_of(4, 1, last ? 3 : 0));
  refused("logprob[3]: 0 elements come from ranks, of 1", parts_of(4, 0, last ? 3 : 0));
  refused("d_logprob[0]: 5 elements come from ranks, of 6", parts_of(4, 0, last ? 4 : 0, 0, 5));
  if (world().size() > 1)
    refused("logprob[0]: 2 elements come from ranks, of 1",
            parts_of(4, 0, world().rank() < 2 ? 4 : 0));
  std::vector<LogprobsPart> short_of = parts_of(4, 0, last ? 4 : 0);
  if (last) short_of[0].values.pop_back();
  refused("logprob has 3 elements; it must have 4 x 1", short_of);
}

}  // namespace GYRE_FILE
}  // namespace gyre
