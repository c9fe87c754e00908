#include "apps/logprobs/options.hpp"

#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

#include "apps/logprobs/registry.hpp"
#include "core/error.hpp"
#include "io/schemas/logprobs_file.hpp"

namespace gyre {
namespace {

constexpr int64_t max_tokens = int64_t{1} << 30;
constexpr int64_t max_columns = std::numeric_limits<int32_t>::max();
constexpr int64_t max_picks = 65536, max_list = 1 << 20;
constexpr double max_scale = 1e6, max_logit = 1e30;

std::vector<Described> described_operations() {
  std::vector<Described> operations;
  for (const LogprobsOperation& operation : logprobs_operations())
    operations.push_back({operation.name, operation.summary});
  return operations;
}

/// Lists the names of operations for which `wanted` is true: "a, b and c".
template <class Wanted>
std::string operations_of(Wanted wanted) {
  std::vector<std::string> names;
  for (const LogprobsOperation& operation : logprobs_operations())
    if (wanted(operation)) names.push_back(operation.name);
  if (names.size() < 2) return fmt::format("{}", fmt::join(names, ""));
  const std::string last = names.back();
  names.pop_back();
  return fmt::format("{} and {}", fmt::join(names, ", "), last);
}

/// Columns of each rank. Throws a usage error if an item is not a size.
std::vector<int64_t> parse_shards(const std::string& text) {
  std::vector<int64_t> sizes;
  for (const std::string& item : items_of(text)) sizes.push_back(parse_size(item));
  return sizes;
}

void declare_problem(OptionTable& table, LogprobsOptions& o) {
  const AddOptions add(table, "Problem");
  add("--input", "Logits, ids and references (HDF5, gyre/logprobs)", o.input)
      .reads_file()
      .problem_file();
  declare_sweep(table, "Tokens, over all context-parallel ranks", o.sweep, max_tokens);
  add("--sequences", "Number of sequences, of about equal length, that the tokens form",
      o.sequences, 1);
  declare_generated(table, o.generate);
  add.size("--capacity", "Slots of the pack that --gen fills; 0: 16K", o.capacity, 0, max_tokens);
  add.size("--vocab", "Ids of the vocabulary", o.vocab, 1, max_columns).in_problem_file();
  add.size("--padded",
           "Columns of all ranks, padding included; 0: --vocab, rounded up to a multiple of --tp",
           o.padded, 0, max_columns)
      .in_problem_file();
  add("--shards",
      "Columns of each tensor-parallel rank, such as 16K,8K,8K; unless given: equal shards",
      o.shards);
  add.size("--picks", "Ids of each token: to gather, of a teacher, or the largest", o.picks, 1,
           max_picks)
      .in_problem_file();
  add.size("--hidden", "Elements of a hidden state", o.hidden, 1, max_list);
  add("--temperature", "Temperature, by which logits are divided", o.temperature,
      {least_temperature, max_temperature})
      .in_problem_file();
  add.size("--top-k", "Sampling filter: number of largest logits that survive; 0: all", o.top_k)
      .in_problem_file();
  add("--min-p",
      "Sampling filter: least probability that survives, as a share of the largest; 0: any",
      o.min_p, {0, 1})
      .in_problem_file();
  add("--top-p", "Sampling filter: share of the probability that survives top-k and min-p; 1: all",
      o.top_p, {.least = 0, .most = 1, .open = true})
      .in_problem_file();
  for (size_t i = 0; i < o.parameters.size(); ++i) {
    const RowParameter& parameter = row_parameters()[i];
    add(parameter.option(), parameter.help, o.parameters[i], {parameter.least, parameter.most})
        .in_problem_file();
  }
  add.flag("--filter-per-token",
           "Give each token its own temperature and filter, made up from those of the options",
           o.filter_per_token)
      .in_problem_file();
  add.choice("-d,--dtype", "Type of logits, gradients, hidden states and weights", o.dtype,
             activation_type_names());
  add("--logit-scale", "Standard deviation of made-up logits", o.logit_scale, {0, max_scale})
      .in_problem_file();
  add.size("--peaks", "Columns of each made-up row whose logits stand out", o.peaks, 0, max_picks)
      .in_problem_file();
  add("--peak-height", "Height by which the logits of --peaks stand out", o.peak_height)
      .in_problem_file();
  add("--zero-fraction", "Share of tokens whose upstream gradient is zero, as those of prompts",
      o.zero_fraction, {0, 1})
      .in_problem_file();
  add.seed("Seed of inputs that are made up", o.seed).in_problem_file();
}

void declare_run(OptionTable& table, LogprobsOptions& o) {
  const AddOptions problem(table, "Problem"), add(table, "Parallelism"),
      advanced(table, "Advanced"), measurement(table, "Measurement"), output(table, "Output");
  problem
      .choices(
          "--op",
          "Operations to run (--list describes them); unless given: all, or those that the file of "
          "--input has answers for",
          o.op, described_operations())
      .in_key();
  problem
      .choices("--method", "Algorithms to run: Gyre's, NeMo RL's where it has one, or both",
               o.method, {{"gyre", "Gyre's algorithm"}, {"upstream", "NeMo RL's algorithm"}})
      .in_key();
  output.flag("--list", "Print operations and layouts, and stop", o.list);
  declare_backend_options(table, o.backend);
  add("--tp", "Tensor-parallel ranks, which share the vocabulary; 0: all that --cp leaves", o.tp,
      0);
  add("--cp", "Context-parallel ranks, which share the tokens; 0: all that --tp leaves", o.cp, 0);
  layout_choices().declare(table, o.layout,
                           "Layout of packed sequences: which rank owns which slots", false);
  advanced
      .choice(gather_gradient_option,
              "Packed sequences, backward: the ranks of --cp compute the whole loss each (split, "
              "unless given), parts of it (sum), or no function of it (none)",
              o.gather_gradient, {"split", "sum", "none"})
      .empty_is("split")
      .show(Shown::usually);
  measurement.choice("--pass", "Passes to time", o.pass, {"fwd", "bwd", "both"}).in_key();
  advanced.size("--chunk", "Rows of a slice of --method upstream; 0: all at once", o.chunk);
  advanced.size("--list-length", "Number of largest logits that a rank sends for a sampling filter",
                o.list_length, 1, max_list);
  advanced.flag("--in-place,!--out-of-place",
                "Write gradients to the memory of the logits (default)", o.in_place);
  advanced.flag(f32_output_option,
                "Write results of log-softmax and softmax in f32, whatever --dtype is",
                o.f32_output);
  add("--threads", "Threads of each rank", o.threads, 1, max_threads);
  declare_repeats(table, "Timed iterations", o.repeats);
  measurement("-w,--warmup", "Untimed iterations before the timed ones", o.warmup, 0);
  measurement.choice("-c,--check", "Iterations to verify: the last one, all, or none", o.check,
                     {"none", "last", "all"});
  measurement.size("--check-tokens",
                   "Number of tokens that a check computes again where --input has no answers",
                   o.check_tokens, 1);
  measurement.choice(
      "--ties",
      "Which of equal logits may be among the largest or survive a filter: those of the "
      "definition (exact), or any",
      o.ties, {"exact", "any"});
  measurement("--tol-scale", "Multiplies all tolerances", o.tol_scale, positive);
  output("-o,--output",
         "Write results and gradients of the operations that run here (HDF5); wrong ones go to "
         "NAME.invalid.h5",
         o.output)
      .writes_file();
  declare_report_options(table, o.report, {});  // check_options() knows the figures
}

void check_source(const LogprobsOptions& o, ConfigErrors& errors) {
  const LogprobsOptions usual;
  if (!o.input.empty() && !o.generate.empty()) errors.add("one of --input and --gen, not both");
  const bool has_length =
      o.sweep.sweeps() || o.sequences != 1 || o.sweep.tokens != usual.sweep.tokens;
  if ((!o.input.empty() || !o.generate.empty()) && has_length)
    errors.add("--tokens, --min and --sequences do not go with --input or --gen");
  if (o.capacity != 0 && o.generate.empty()) errors.add("--capacity goes with --gen");
}

void check_sizes(const LogprobsOptions& o, ConfigErrors& errors) {
  check_sweep(o.sweep, LogprobsOptions().sweep.tokens, errors);
  const int64_t fewest = o.sweep.sweeps() ? o.sweep.min : o.sweep.tokens;
  if (o.sequences > fewest)
    errors.add("--sequences {} of {} tokens; at most {}", o.sequences, fewest, fewest);
}

void check_values(const LogprobsOptions& o, ConfigErrors& errors) {
  if (o.top_k > o.vocab)
    errors.add("--top-k {} of --vocab {}; the nearest is {}", o.top_k, o.vocab, o.vocab);
  // Random normal numbers rarely exceed 8. The check keeps scaled logits far from f32's limits.
  const double largest =
      (8 * o.logit_scale + std::abs(o.peak_height)) / std::min(1.0, o.temperature);
  if (largest > max_logit)
    errors.add(
        "--logit-scale {} and --peak-height {} over --temperature {} make logits of {:.3g}; at "
        "most {:.3g}",
        o.logit_scale, o.peak_height, o.temperature, largest, max_logit);
}

/// Up to three grids of `ranks` ranks that are nearest to the requested one.
std::string grid_hint(const LogprobsOptions& o, int ranks) {
  std::vector<int> all(ranks);
  std::iota(all.begin(), all.end(), 1);
  std::vector<std::string> some;
  for (const GridShape& grid : nearest_grids({1, o.cp, o.tp}, ranks, all))
    if (grid.dp == 1 && some.size() < 3)
      some.push_back(fmt::format("--tp {} --cp {}", grid.tp, grid.cp));
  return fmt::format("{}", fmt::join(some, " | "));
}

void check_shards(const LogprobsOptions& o, ConfigErrors& errors) {
  const std::vector<int64_t> sizes = parse_shards(o.shards);
  if (std::ssize(sizes) != o.tp)
    errors.add("--shards {} is {} shards, but --tp is {}; give {}", o.shards, sizes.size(), o.tp,
               o.tp);
  int64_t columns = 0;
  for (const int64_t size : sizes) columns += std::min(size, max_columns + 1 - columns);
  if (columns > max_columns)
    errors.add("--shards {}: at most {} columns in all", o.shards, max_columns);
  if (o.input.empty() && columns < o.vocab)
    errors.add("--shards {} are {} columns for --vocab {}; at least {}", o.shards, columns, o.vocab,
               o.vocab);
}

void check_columns(const LogprobsOptions& o, ConfigErrors& errors) {
  if (!o.shards.empty() && o.padded != 0)
    return errors.add("one of --padded and --shards, not both");
  if (o.padded != 0 && o.padded < o.vocab)
    return errors.add("--padded {} is less than --vocab {}; the nearest is {}", o.padded, o.vocab,
                      round_up(o.vocab, o.tp));
  const size_t others = errors.messages().size();
  try {
    if (!o.shards.empty()) check_shards(o, errors);
    if (o.input.empty() && errors.messages().size() == others) o.partition();
  } catch (const Error& error) {
    if (error.code() != ExitCode::usage) throw;
    errors.add("{}: {}", o.shards.empty() ? "--vocab, --padded" : "--shards", error.what());
  }
}

/// Adds an error for `option`, with the text `given`, unless an operation of the run reads it.
void check_own_option(const LogprobsOptions& o, const char* option, const std::string& given,
                      ConfigErrors& errors) {
  bool read = false;
  std::vector<std::string> readers;
  for (const LogprobsOperation& operation : logprobs_operations()) {
    if (!operation.reads(option)) continue;
    readers.push_back(operation.name);
    read = read || o.wants(operation.name);
  }
  if (!read)
    errors.add("{} goes with --op {} or all, not with {}", given, fmt::join(readers, ", "), o.op);
}

void check_own_options(const LogprobsOptions& o, ConfigErrors& errors) {
  const LogprobsOptions usual;
  for (size_t i = 0; i < o.parameters.size(); ++i)
    if (const std::string option = row_parameters()[i].option();
        o.input.empty() && o.parameters[i] != usual.parameters[i])
      check_own_option(o, option.c_str(), option, errors);
  if (o.f32_output) check_own_option(o, f32_output_option, f32_output_option, errors);
  if (o.gather_gradient.empty()) return;
  check_own_option(o, gather_gradient_option,
                   fmt::format("{} {}", gather_gradient_option, o.gather_gradient), errors);
  if (o.pass == "fwd")
    errors.add("{} {} is of backward passes: not with --pass fwd", gather_gradient_option,
               o.gather_gradient);
}

void check_run(const LogprobsOptions& o, int ranks, ConfigErrors& errors) {
  if (int64_t{o.tp} * o.cp != ranks)
    errors.add("--tp {} --cp {} in a run of {} ranks; the nearest grids: {}", o.tp, o.cp, ranks,
               grid_hint(o, ranks));
  else
    check_columns(o, errors);
  if (o.backend.on_gpu() && o.wants_method("upstream"))
    errors.add(
        "--method {} runs NeMo RL's algorithm, which is here for --backend cpu alone; with "
        "--backend cuda the nearest is --method gyre",
        o.method);
  if (o.backend.on_gpu() && o.threads > 1)
    errors.add("--threads {} are of a CPU; with --backend cuda the nearest is 1", o.threads);
  if (o.chunk != 0 && !o.wants_method("upstream"))
    errors.add("--chunk {} goes with --method upstream or all", o.chunk);
  layout_choices().check(o.layout, errors);
  const auto none_of_wanted = [&](const auto& has) {
    return std::ranges::none_of(logprobs_operations(), [&](const LogprobsOperation& operation) {
      return o.wants(operation.name) && has(operation);
    });
  };
  const auto has_upstream = [](const auto& operation) { return operation.has_upstream(); };
  if (o.method == "upstream" && none_of_wanted(has_upstream))
    errors.add("--op {} has no --method upstream, which {} have; the nearest is --method gyre",
               o.op, operations_of(has_upstream));
  if (o.pass == "bwd" && none_of_wanted([](const auto& op) { return op.has_backward(); }))
    errors.add("--op {} has no backward pass; the nearest is --pass fwd", o.op);
  if (!o.output.empty() && o.report.resume != "none")
    errors.add("--resume leaves rows out, and --output needs them");
  if (!o.output.empty() && o.sweep.cycles > 1)
    errors.add("--output of --cycles {}: it needs one", o.sweep.cycles);
  if (!o.output.empty() && o.sweep.sweeps() && o.sweep.max != o.sweep.min)
    errors.add("--output needs one size, not --min and --max");
  if (!o.output.empty() && (o.pass == "bwd" || o.method == "upstream"))
    errors.add(
        "--output writes results of our operations, forward too: not with --pass {} --method {}",
        o.pass, o.method);
}

void complete_grid(LogprobsOptions& o, int ranks) {
  if (o.tp == 0 && o.cp == 0 && !o.shards.empty())
    o.tp = static_cast<int>(1 + std::count(o.shards.begin(), o.shards.end(), ','));
  if (o.tp == 0) o.tp = std::max(1, ranks / std::max(1, o.cp));
  if (o.cp == 0) o.cp = std::max(1, ranks / o.tp);
}

}  // namespace

LogprobsOptions::LogprobsOptions() {
  layout.taken = {"chunk"};
  for (const RowParameter& parameter : row_parameters()) parameters.push_back(parameter.usual);
}

std::vector<double> LogprobsOptions::parameters_of(const RowOperation& operation) const {
  std::vector<double> own;
  for (const RowParameter& parameter : operation.parameters) {
    const auto at = std::ranges::find(row_parameters(), parameter.name, &RowParameter::name);
    own.push_back(parameters.at(at - row_parameters().begin()));
  }
  return own;
}

VocabPartition LogprobsOptions::partition() const {
  if (!shards.empty()) return partition_of(parse_shards(shards), vocab);
  return even_partition(vocab, padded > 0 ? padded : round_up(vocab, tp), tp);
}

std::vector<Pass> LogprobsOptions::passes() const {
  if (pass == "fwd") return {Pass::forward};
  if (pass == "bwd") return {Pass::backward};
  return {Pass::forward, Pass::backward};
}

GatherGradient LogprobsOptions::gather_convention() const {
  if (gather_gradient == "sum") return GatherGradient::sum;
  return gather_gradient == "none" ? GatherGradient::none : GatherGradient::split;
}

void declare_options(OptionTable& table, LogprobsOptions& o) {
  declare_problem(table, o);
  declare_run(table, o);
}

void check_options(LogprobsOptions& o, int ranks) {
  complete_grid(o, ranks);
  if (o.op.empty()) o.op_is_given = false;
  if (o.op.empty()) o.op = "all";
  if (!o.generate.empty() && o.capacity == 0) o.capacity = 16384;
  ConfigErrors errors;
  check_source(o, errors);
  check_sizes(o, errors);
  check_values(o, errors);
  check_run(o, ranks, errors);
  check_own_options(o, errors);
  errors.throw_if_any("impossible configuration");
}

std::string method_note(const LogprobsOptions& o) {
  if (!o.wants_method("upstream")) return "";
  const std::string names = operations_of([&](const LogprobsOperation& operation) {
    return o.wants(operation.name) && !operation.has_upstream() &&
           (o.pass != "bwd" || operation.has_backward());
  });
  if (names.empty()) return "";
  return fmt::format("# note: upstream has no counterpart of {}; {}\n", names,
                     o.wants_method("gyre") ? "only Gyre's run" : "left out");
}

std::string operation_help() {
  std::string text = "Operations (u: upstream's algorithm too; f: forward only):\n";
  for (const LogprobsOperation& operation : logprobs_operations())
    text += fmt::format("  {:<22}{}{} {}\n", operation.name, operation.has_upstream() ? 'u' : ' ',
                        operation.has_backward() ? ' ' : 'f', operation.summary);
  return text + layout_help();
}

}  // namespace gyre
