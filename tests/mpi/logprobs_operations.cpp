// Every operation of gyre-logprobs is complete: its entry, its closed form of messages and bytes,
// and what it is compared with.

#include <cmath>
#include <fstream>
#include <set>
#include <sstream>

#include "apps/logprobs/registry.hpp"
#include "mpi_test.hpp"

namespace gyre {
namespace GYRE_FILE {

using test::world;

/// A problem that no operation refuses, and that all rows of lists of the filter hold.
LogprobsOptions small_options(int tp, int cp, const std::string& gather_gradient) {
  LogprobsOptions o;
  o.sweep.tokens = 19;
  o.sequences = 3;
  o.vocab = 90;
  o.picks = 3;
  o.hidden = 8;
  o.peaks = 2;
  o.tp = tp;
  o.cp = cp;
  o.gather_gradient = gather_gradient;
  check_options(o, tp * cp);
  return o;
}

/// Runs all passes of an operation and compares what is counted with the closed form.
void expect_counts(const LogprobsRun& run, LogprobsContext& context) {
  const LogprobsOperation& operation = run.operation;
  const std::unique_ptr<LogprobsOp> op = run.make(context);
  if (operation.has_backward()) op->prepare_backward();
  op->start();
  EXPECT_EQ(op->has_backward(), operation.has_backward()) << operation.name;
  for (const Pass pass : {Pass::forward, Pass::backward}) {
    if (pass == Pass::backward && !operation.has_backward()) continue;
    const SentTraffic before = op->sent();
    op->run(pass);
    const SentTraffic sent = op->sent() - before;
    const std::string label = op->label(pass) + " " + context.options.gather_gradient;
    const std::optional<SentTraffic> expected = op->expected(pass);
    EXPECT_TRUE(expected.has_value()) << label;
    if (!expected) continue;
    EXPECT_EQ(sent.messages, expected->messages) << label;
    EXPECT_EQ(sent.bytes, expected->bytes) << label;
    const bool is_product = operation.traffic(pass) == RowTraffic::products;
    EXPECT_EQ(std::isnan(op->flops(pass)), !is_product) << label;
    EXPECT_TRUE(!is_product || std::isnan(op->ideal_bytes(pass))) << label;
  }
}

TEST(Operations, HaveAClosedFormForEveryPassAndMethod) {
  for (int tp = 1; tp <= world().size(); ++tp) {
    if (world().size() % tp != 0) continue;
    const GridShape shape{1, world().size() / tp, tp};
    ProcessGrid grid(world(), shape);
    LogprobsBackend backend(grid);
    const LogprobsOptions o = small_options(tp, shape.cp, "");
    const LogprobsWorkload problem = generated_workload(o, o.sweep.tokens);
    const auto inputs = random_inputs(problem, o);
    LogprobsContext context(problem, *inputs, o, backend);
    for (const LogprobsOperation& operation : logprobs_operations())
      for (const LogprobsMethod& method : operation.methods) {
        EXPECT_EQ(method.why_not(problem, o), "") << operation.name;
        expect_counts({operation, method}, context);
      }
  }
}

// Of predictions gathered over context-parallel ranks, by each convention of their gradient.
TEST(Operations, HaveAClosedFormForEveryOptionOfTheirOwn) {
  ProcessGrid grid(world(), {1, world().size(), 1});
  LogprobsBackend backend(grid);
  for (const char* convention : {"split", "sum", "none"}) {
    const LogprobsOptions o = small_options(1, world().size(), convention);
    const LogprobsWorkload problem = generated_workload(o, o.sweep.tokens);
    const auto inputs = random_inputs(problem, o);
    LogprobsContext context(problem, *inputs, o, backend);
    int readers = 0;
    for (const LogprobsOperation& operation : logprobs_operations()) {
      if (!operation.reads(gather_gradient_option)) continue;
      expect_counts({operation, operation.methods[0]}, context);
      ++readers;
    }
    EXPECT_EQ(readers, 3);
  }
}

std::string text_of(const std::string& path) {
  std::ifstream file(std::string(GYRE_SOURCE_DIR) + "/" + path);
  std::stringstream text;
  text << file.rdbuf();
  return text.str();
}

TEST(Operations, HaveCompleteEntries) {
  const std::string definitions = text_of("src/logprobs/reference.hpp");
  ASSERT_FALSE(definitions.empty());
  std::set<std::string> names, summaries;
  for (const LogprobsOperation& operation : logprobs_operations()) {
    EXPECT_TRUE(names.insert(operation.name).second) << operation.name;
    EXPECT_TRUE(summaries.insert(operation.summary).second) << operation.name;
    EXPECT_FALSE(operation.summary.empty()) << operation.name;
    ASSERT_FALSE(operation.methods.empty()) << operation.name;
    EXPECT_EQ(operation.methods[0].name, "gyre") << operation.name;
    EXPECT_FALSE(operation.figure.metric.empty() || operation.figure.unit.empty())
        << operation.name;
    // Each routine that an entry names as its definition exists.
    const std::string& definition = operation.definition;
    int routines = 0;
    const char* const letters = "abcdefghijklmnopqrstuvwxyz_";
    for (size_t begin = 0, end = 0; end < definition.size(); begin = end + 1) {
      end = std::min(definition.find_first_not_of(letters, begin), definition.size());
      const std::string word = definition.substr(begin, end - begin);
      if (!word.ends_with("_reference")) continue;
      ++routines;
      EXPECT_NE(definitions.find(" " + word + "("), std::string::npos)
          << operation.name << ": there is no " << word;
    }
    EXPECT_TRUE(routines > 0 || definition == "the logits") << operation.name;
    // A gradient takes memory, and what only writes or multiplies has one pass or both of a kind.
    EXPECT_NE(operation.forward, RowTraffic::updates) << operation.name;
    EXPECT_EQ(operation.forward == RowTraffic::products,
              static_cast<bool>(operation.bytes_without_logits))
        << operation.name;
  }
}

}  // namespace GYRE_FILE
}  // namespace gyre
