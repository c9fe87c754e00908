// Log-probability problems read by all ranks, and results written from blocks of tokens.

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>

#include "io/compare.hpp"
#include "io/logprobs_file.hpp"
#include "io_files.hpp"
#include "mpi_test.hpp"

namespace gyre {
namespace GYRE_FILE {

using test::expect_error;
using test::input;
using test::on_root;
using test::SharedFolder;
using test::world;

TEST(LogprobsFile, ReadsTheGoldenProblem) {
  const LogprobsFile f = read_logprobs_file(world(), input("logprobs_golden.h5"));
  EXPECT_EQ(f.vocab_size, 64);
  EXPECT_EQ(f.columns, 64);
  EXPECT_EQ(f.picks, 4);
  EXPECT_EQ(f.top_k, 10);
  EXPECT_EQ(f.top_p, 0.9);
  EXPECT_EQ(f.temperature, 1);
  EXPECT_EQ(f.offsets, (std::vector<int64_t>{0, 8, 16}));
  EXPECT_EQ(f.longest(), 8);
  EXPECT_EQ(f.logits.at(57), 6);
  EXPECT_EQ(f.targets.at(9), (7 + 13 + 5) % 64);
  ASSERT_TRUE(f.reference.has_value());
  EXPECT_EQ(f.reference->generator, "inputs/make_logprobs.py");
  EXPECT_NEAR(f.reference->logprob.at(0), -3.123163688, 1e-9);
  EXPECT_NEAR(f.reference->entropy.at(0), 2.643832576, 1e-9);
  EXPECT_NEAR(f.reference->soft_cross_entropy.at(0), 8.344218829, 1e-9);
  EXPECT_NEAR(f.reference->next_token_logprob.at(0), -11.873163688, 1e-9);
  EXPECT_NEAR(f.reference->gathered.at(1), -4.498163688, 1e-9);
  EXPECT_EQ(f.reference->top_ids.at(0), 57);
  EXPECT_EQ(f.reference->top_values.at(1), 5.875);
  EXPECT_EQ(std::ssize(f.reference->d_filtered_logprob), 16 * 64);
}

TEST(LogprobsFile, ReadsTies) {
  const LogprobsFile f = read_logprobs_file(world(), input("logprobs_ties.h5"));
  EXPECT_EQ(f.vocab_size, 101);
  EXPECT_EQ(f.columns, 108);
  EXPECT_EQ(f.temperature, 2);
  EXPECT_EQ(f.targets.at(0), -100);
  EXPECT_EQ(f.offsets, (std::vector<int64_t>{0, 1, 1, 7, 17}));
  EXPECT_EQ(f.reference->filtered_logprob.at(0), -HUGE_VAL);
  EXPECT_EQ(f.logits.at(103), 3e38F);
}

TEST(LogprobsFile, ReadsHiddenStatesAndAHead) {
  const LogprobsFile f = read_logprobs_file(world(), input("logprobs_linear.h5"));
  EXPECT_EQ(f.vocab_size, 61);
  ASSERT_TRUE(f.linear.has_value());
  EXPECT_EQ(f.linear->width, 12);
  ASSERT_EQ(std::ssize(f.linear->hidden), 14 * 12);
  ASSERT_EQ(std::ssize(f.linear->head), 61 * 12);
  for (const auto& [t, v] : {std::pair<int64_t, int64_t>{0, 0}, {13, 60}, {7, 17}}) {
    float z = 0;
    for (int64_t d = 0; d < 12; ++d)
      z += f.linear->hidden.at(static_cast<size_t>(12 * t + d)) *
           f.linear->head.at(static_cast<size_t>(12 * v + d));
    EXPECT_EQ(f.logits.at(static_cast<size_t>(64 * t + v)), z);
  }
  ASSERT_TRUE(f.reference && f.reference->linear);
  EXPECT_NEAR(f.reference->linear->logprob.at(4), f.reference->logprob.at(4), 1e-12);
  EXPECT_NEAR(f.reference->linear->entropy.at(5), std::log(61), 1e-12);
  EXPECT_EQ(std::ssize(f.reference->linear->d_hidden), 14 * 12);
  EXPECT_EQ(std::ssize(f.reference->linear->d_head), 61 * 12);
  EXPECT_FALSE(read_logprobs_file(world(), input("logprobs_ties.h5")).linear.has_value());
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
  h5::Shape hidden, head;  // empty: there is none
  float factor = 1;        // all of their elements
  std::vector<std::string> linear_answers;
  std::string omit;
};

void write_floats(h5::File& file, const std::string& path, const h5::Shape& shape,
                  const std::vector<float>& values) {
  file.create_dataset(path, DType::f32, shape, h5::Checksum::fletcher32);
  const h5::Slab all{h5::Shape(shape.size(), 0), shape};
  file.dataset(path).write<float>(std::span(&all, 1), values);
}

void write_numbers(h5::File& file, const std::string& path, const h5::Shape& shape, double value) {
  file.create_dataset(path, DType::f64, shape, h5::Checksum::fletcher32);
  const std::vector<double> values(static_cast<size_t>(h5::elements_of(shape)), value);
  const h5::Slab all{h5::Shape(shape.size(), 0), shape};
  file.dataset(path).write<double>(std::span(&all, 1), values);
}

void write_ids(h5::File& file, const std::string& path, const h5::Shape& shape, int32_t id) {
  file.create_dataset(path, DType::i32, shape, h5::Checksum::fletcher32);
  const std::vector<int32_t> ids(static_cast<size_t>(h5::elements_of(shape)), id);
  const h5::Slab all{h5::Shape(shape.size(), 0), shape};
  file.dataset(path).write<int32_t>(std::span(&all, 1), ids);
}

void write_draft(const std::string& path, const Draft& d) {
  h5::File file = h5::File::create(path);
  write_schema(file, logprobs_schema, {});
  file.create_group("/logprobs");
  file.write_attribute("/logprobs", "vocab_size", d.vocab_size);
  file.write_attribute("/logprobs", "top_k", d.top_k);
  file.write_attribute("/logprobs", "top_p", d.top_p);
  file.write_attribute("/logprobs", "temperature", d.temperature);
  file.write_dataset("/logprobs/offsets", std::span<const int64_t>(d.offsets));
  std::vector<float> logits(static_cast<size_t>(h5::elements_of(d.logits)), 0.5F);
  logits.at(3) = NAN;  // padding
  logits.at(static_cast<size_t>(d.logits[1])) = d.logit;
  if (d.omit != "logits") write_floats(file, "/logprobs/logits", d.logits, logits);
  if (d.omit != "teacher") write_floats(file, "/logprobs/teacher", d.logits, logits);
  write_ids(file, "/logprobs/targets", {2}, -100);
  write_ids(file, "/logprobs/ids", d.ids, d.id);
  write_floats(file, "/logprobs/d_value", {2}, {1, d.gradient});
  const auto write_factor = [&](const char* name, const h5::Shape& shape) {
    const auto count = static_cast<size_t>(h5::elements_of(shape));
    if (!shape.empty()) write_floats(file, name, shape, std::vector<float>(count, d.factor));
  };
  write_factor("/logprobs/hidden", d.hidden);
  write_factor("/logprobs/head", d.head);
  file.create_group("/reference");
  file.write_attribute("/reference", "generator", std::string("test"));
  for (const char* name : {"logprob", "entropy", "soft_cross_entropy", "filtered_logprob"})
    write_numbers(file, fmt::format("/reference/{}", name), {2}, d.answer);
  for (const char* name :
       {"d_logprob", "d_entropy", "d_gathered", "d_soft_cross_entropy", "d_filtered_logprob"})
    write_numbers(file, fmt::format("/reference/{}", name), {2, 3}, 0);
  write_numbers(file, "/reference/gathered", {2, d.gathered_width}, 0);
  write_numbers(file, "/reference/top_values", {2, 2}, 0);
  write_ids(file, "/reference/top_ids", {2, 2}, 0);
  write_numbers(file, "/reference/next_token_logprob", {1, 1}, 0);
  for (const std::string& name : d.linear_answers) {
    h5::Shape shape{2};
    if (name == "d_hidden") shape = {2, 5};
    if (name == "d_head") shape = {3, 5};
    write_numbers(file, "/reference/" + name, shape, d.answer);
  }
  file.close();
}

void expect_refused(const std::vector<std::string>& problems,
                    const std::function<void(Draft&)>& spoil) {
  const SharedFolder folder;
  const std::string path = folder.file("f.h5");
  on_root([&] {
    Draft draft;
    spoil(draft);
    write_draft(path, draft);
  });
  std::string message = "(nothing thrown)";
  try {
    read_logprobs_file(world(), path);
  } catch (const Error& error) {
    message = error.what();
    EXPECT_EQ(error.code(), ExitCode::usage);
    EXPECT_TRUE(error.agreed() || world().size() == 1);
  }
  for (const std::string& problem : problems)
    EXPECT_NE(message.find("- " + problem), std::string::npos)
        << message << "\nexpected in it: " << problem;
  EXPECT_EQ(std::count(message.begin(), message.end(), '\n'), std::ssize(problems)) << message;
}

TEST(LogprobsFile, TheDraftIsGood) {
  const SharedFolder folder;
  on_root([&] { write_draft(folder.file("f.h5"), {}); });
  const LogprobsFile f = read_logprobs_file(world(), folder.file("f.h5"));
  EXPECT_EQ(f.tokens(), 2);
  EXPECT_EQ(f.columns, 4);
  EXPECT_TRUE(std::isnan(f.logits.at(3)));
}

TEST(LogprobsFile, RefusesAttributesWithoutMeaning) {
  expect_refused({"top_k of '/logprobs' is 4; it must be 0, none, or at most vocab_size, 3",
                  "top_p of '/logprobs' is 0; it must be above 0 and at most 1, none",
                  "temperature of '/logprobs' is -1; it must be from 1e-30 to 1e+30"},
                 [](Draft& d) { d.top_k = 4, d.top_p = 0, d.temperature = -1; });
}

TEST(LogprobsFile, RefusesShapesThatDoNotFit) {
  expect_refused({"there is no dataset '/logprobs/teacher'; it must be float32 [2, 4]"},
                 [](Draft& d) { d.omit = "teacher"; });
  expect_refused({"dataset '/logprobs/ids' is int32 [3, 2]; it must be int32 [2, any]"},
                 [](Draft& d) {
                   d.ids = {3, 2};
                 });
  expect_refused({"dataset '/reference/gathered' is float64 [2, 3]; it must be float64 [2, 2]"},
                 [](Draft& d) { d.gathered_width = 3; });
}

// Both or neither, of one width, and with answers where the file has any.
TEST(LogprobsFile, RefusesHiddenStatesAndAHeadThatDoNotFit) {
  expect_refused({"there is no dataset '/logprobs/head'; it must be float32 [3, 5]",
                  "there is no dataset '/reference/d_head'; it must be float64 [3, 5]"},
                 [](Draft& d) {
                   d.hidden = {2, 5};
                   d.linear_answers = {"linear_logprob", "linear_entropy", "d_hidden"};
                 });
  expect_refused({"there is no dataset '/logprobs/hidden'; it must be float32 [2, any]",
                  "there is no dataset '/reference/linear_logprob'; it must be float64 [2]",
                  "there is no dataset '/reference/linear_entropy'; it must be float64 [2]",
                  "there is no dataset '/reference/d_hidden'; it must be float64 [2, any]",
                  "there is no dataset '/reference/d_head'; it must be float64 [3, any]"},
                 [](Draft& d) {
                   d.head = {3, 5};
                 });
  expect_refused({"dataset '/logprobs/hidden' is float32 [4, 5]; it must be float32 [2, any]",
                  "there is no dataset '/reference/d_head'; it must be float64 [3, any]"},
                 [](Draft& d) {
                   d.hidden = {4, 5};
                   d.head = {3, 5};
                   d.linear_answers = {"linear_logprob", "linear_entropy", "d_hidden"};
                 });
  expect_refused({"dataset '/logprobs/head' is float32 [4, 6]; it must be float32 [3, 5]",
                  "there is no dataset '/reference/d_head'; it must be float64 [3, 5]"},
                 [](Draft& d) {
                   d.hidden = {2, 5};
                   d.head = {4, 6};
                   d.linear_answers = {"linear_logprob", "linear_entropy", "d_hidden"};
                 });
  expect_refused({"/logprobs/hidden is [2, 0]; a hidden state has at least one element",
                  "dataset '/logprobs/head' is float32 [3, 5]; it must be float32 [3, 0]",
                  "dataset '/reference/d_hidden' is float64 [2, 5]; it must be float64 [2, 0]",
                  "there is no dataset '/reference/d_head'; it must be float64 [3, 0]"},
                 [](Draft& d) {
                   d.hidden = {2, 0};
                   d.head = {3, 5};
                   d.linear_answers = {"linear_logprob", "linear_entropy", "d_hidden"};
                 });
}

TEST(LogprobsFile, RefusesNumbersOutOfPlace) {
  expect_refused({"/logprobs/logits[1, 0] is nan; it must be finite or -inf",
                  "/logprobs/teacher[1, 0] is nan; it must be finite or -inf"},
                 [](Draft& d) { d.logit = NAN; });
  expect_refused({"/logprobs/logits[1, 0] is inf; it must be finite or -inf",
                  "/logprobs/teacher[1, 0] is inf; it must be finite or -inf"},
                 [](Draft& d) { d.logit = std::numeric_limits<float>::infinity(); });
  expect_refused({"/logprobs/ids[0] is 3; ids are 0 to 2"}, [](Draft& d) { d.id = 3; });
  expect_refused({"/logprobs/d_value[1] is nan; it must be finite"},
                 [](Draft& d) { d.gradient = NAN; });
  expect_refused(
      {"/logprobs/offsets[1], the last, is 3; it must be 2, the rows of /logprobs/logits"},
      [](Draft& d) {
        d.offsets = {0, 3};
      });
  expect_refused({"/logprobs/hidden[0] is inf; it must be finite",
                  "/logprobs/head[0] is inf; it must be finite"},
                 [](Draft& d) {
                   d.hidden = {2, 5};
                   d.head = {3, 5};
                   d.factor = std::numeric_limits<float>::infinity();
                   d.linear_answers = {"linear_logprob", "linear_entropy", "d_hidden", "d_head"};
                 });
  std::vector<std::string> answers;
  for (const char* name : {"logprob", "entropy", "soft_cross_entropy", "filtered_logprob"})
    answers.push_back(fmt::format("/reference/{}[0] is nan; an answer is a number", name));
  expect_refused(answers, [](Draft& d) { d.answer = NAN; });
}

TEST(LogprobsFile, RefusesOtherAndDamagedFiles) {
  expect_error(ExitCode::usage, "is of the kind 'gyre/bshd'; 'gyre/logprobs' is needed",
               [] { read_logprobs_file(world(), input("bshd_tiny.h5")); });
  const SharedFolder folder;
  on_root([&] { test::copy_truncated(input("logprobs_ties.h5"), folder.file("cut.h5"), 1000); });
  expect_error(ExitCode::runtime, folder.file("cut.h5"),
               [&] { read_logprobs_file(world(), folder.file("cut.h5")); });
}

constexpr int64_t length = 3;

/// Tokens [begin, begin + count) with values that tell where they belong.
struct Rows {
  std::vector<float> logprob, entropy, filtered, top_values;
  std::vector<int32_t> top_ids;
  LogprobsResultRows rows;

  Rows(int64_t begin, int64_t count) {
    for (int64_t t = begin; t < begin + count; ++t) {
      logprob.push_back(static_cast<float>(10 * t + 1));
      entropy.push_back(static_cast<float>(10 * t + 2));
      filtered.push_back(static_cast<float>(10 * t + 3));
      for (int64_t k = 0; k < length; ++k) {
        top_values.push_back(static_cast<float>(100 * t + k));
        top_ids.push_back(static_cast<int32_t>(200 * t + k));
      }
    }
    rows = {begin, logprob, entropy, filtered, top_values, top_ids};
  }
};

LogprobsResultsHeader header_for(int64_t tokens) {
  LogprobsResultsHeader header;
  header.tokens = tokens;
  header.vocab_size = 500;
  header.length = length;
  header.top_p = 0.5;
  header.input_sha256 = std::string(64, 'a');
  header.provenance = {{"generator", "test"}};
  return header;
}

void save(const std::string& path, int64_t tokens, const Rows& mine) {
  OutputFile output(world(), path);
  write_logprobs_results(output, header_for(tokens), mine.rows);
  output.commit();
}

TEST(LogprobsResults, BlocksFromAnyRank) {
  const SharedFolder folder;
  const std::string path = folder.file("r.h5");
  const int64_t ranks = world().size();
  for (const int64_t tokens : {0, 1, 3, 29}) {
    // Backwards over the ranks.
    const int64_t block = ranks - 1 - world().rank();
    const int64_t begin = tokens * block / ranks, end = tokens * (block + 1) / ranks;
    save(path, tokens, Rows(begin, end - begin));
    const h5::File file = open_schema_file(world(), path, logprobs_results_schema);
    EXPECT_EQ(std::get<std::string>(file.attribute("/results", "input_sha256")),
              std::string(64, 'a'));
    EXPECT_EQ(std::get<int64_t>(file.attribute("/results", "vocab_size")), 500);
    EXPECT_EQ(std::get<double>(file.attribute("/results", "top_p")), 0.5);
    const Rows all(0, tokens);
    EXPECT_EQ(file.dataset("/results/logprob").read_all<float>(), all.logprob);
    EXPECT_EQ(file.dataset("/results/entropy").read_all<float>(), all.entropy);
    EXPECT_EQ(file.dataset("/results/filtered_logprob").read_all<float>(), all.filtered);
    EXPECT_EQ(file.dataset("/results/top_values").read_all<float>(), all.top_values);
    EXPECT_EQ(file.dataset("/results/top_ids").read_all<int32_t>(), all.top_ids);
    EXPECT_EQ(file.dataset("/results/top_ids").shape(), (h5::Shape{tokens, length}));
  }
}

TEST(LogprobsResults, EveryTokenOnce) {
  const SharedFolder folder;
  const std::string path = folder.file("r.h5");
  const bool last = world().rank() == world().size() - 1;
  const auto refused = [&](const std::string& part, int64_t begin, int64_t count) {
    const Rows mine(begin, last ? count : 0);
    expect_error(ExitCode::runtime, part, [&] { save(path, 4, mine); });
    EXPECT_FALSE(std::filesystem::exists(path));
  };
  refused("token 0 of 4 comes from no rank", 1, 3);
  refused("token 3 of 4 comes from no rank", 0, 3);
  refused("token 4 comes from a rank, but there are 4", 0, 5);
  if (world().size() > 1) {
    const Rows same(0, world().rank() < 2 ? 4 : 0);
    expect_error(ExitCode::runtime, "token 0 comes from two ranks", [&] { save(path, 4, same); });
  }
  Rows short_of(0, last ? 4 : 0);
  if (last) short_of.rows.entropy = short_of.rows.entropy.first(3);
  expect_error(ExitCode::runtime, "/results/entropy has 3 elements; it must have 4",
               [&] { save(path, 4, short_of); });
}

}  // namespace GYRE_FILE
}  // namespace gyre
