// gyre-pipeline: documents in, per-token log-probabilities and entropies out, on a dp × cp × tp
// grid.

#include <fmt/format.h>

#include <cstdio>
#include <optional>

#include "comm/agree.hpp"
#include "comm/process_grid.hpp"
#include "io/model_file.hpp"
#include "io/results.hpp"
#include "io/sha256.hpp"
#include "model/scoring.hpp"
#include "report/app.hpp"
#include "report/options.hpp"
#include "report/score_check.hpp"
#include "report/scoring_report.hpp"

namespace {

using namespace gyre;

struct Options {
  std::string input, model, output, json, csv, schedule = "ring", check = "last";
  int dp = 1, cp = 0, tp = 1, iterations = 1, warmup = 0, top = 0;
  int64_t bin = 0, check_tokens = 4096;
  double tol_scale = 1;
  bool dry_run = false;
};

void declare(CLI::App& app, Options& o) {
  std::vector<std::string> names;
  for (const Schedule& schedule : schedules()) names.push_back(schedule.name);
  add_option(app,
             {"--input", "Documents (HDF5, gyre/documents), with a reference or without", true},
             o.input);
  add_option(app, {"--model", "Weights (HDF5, gyre/model)", true}, o.model);
  add_option(app, {"-o,--output", "Write scores here (HDF5, gyre/results)"}, o.output);
  add_size_option(app, {"--bin", "Slots of a bin, a multiple of 2 cp; 0: 8K, rounded up to one"},
                  o.bin);
  add_option(app, {"--dp", "Data-parallel replicas"}, o.dp, 1);
  add_option(app, {"--cp", "Context-parallel ranks; 0: all that dp and tp leave"}, o.cp, 0);
  add_option(app, {"--tp", "Tensor-parallel ranks"}, o.tp, 1);
  add_choice_option(app, {"--schedule", "Context-parallel schedule"}, o.schedule, names);
  add_option(app, {"-n,--iters", "Timed passes over all documents"}, o.iterations, 1);
  add_option(app, {"-w,--warmup", "Passes before them"}, o.warmup, 0);
  add_choice_option(app, {"-c,--check", "Verify the last pass, or nothing"}, o.check,
                    {"none", "last"});
  add_size_option(app,
                  {"--check-tokens", "Without a reference: tokens that the serial twin scores"},
                  o.check_tokens, 2);
  add_option(app, {"--tol-scale", "Multiplies all tolerances"}, o.tol_scale);
  add_option(app, {"--top", "List the documents that cost most bits"}, o.top, 0);
  add_option(app, {"-J,--json", "Write the result here (gyre-result/1)"}, o.json);
  add_option(app, {"--csv", "Write the table here"}, o.csv);
  add_flag(app,
           {"--dry-run",
            "Show sizes, bytes and memory of the grid and stop; any grid, any number of ranks"},
           o.dry_run);
}

/// The grid, or a usage error with everything that is wrong with it and the nearest possible ones.
GridShape choose_grid(Options& o, const ModelConfig& config, const Documents& documents,
                      int ranks) {
  const GridShape shape{o.dp, o.cp > 0 ? o.cp : std::max(1, ranks / (o.dp * o.tp)), o.tp};
  if (o.bin == 0) o.bin = round_up(8192, 2 * shape.cp);
  Problems problems;
  check_tensor_parallel(config, shape.tp, problems);
  if (!o.dry_run && shape.ranks() != ranks)
    problems.add("{} is {} ranks, but the run has {}", to_string(shape), shape.ranks(), ranks);
  if (o.bin % (2 * shape.cp) != 0)
    problems.add("--bin {} is not a multiple of 2 cp = {}; the nearest are {} and {}", o.bin,
                 2 * shape.cp,
                 std::max<int64_t>(2 * shape.cp, o.bin / (2 * shape.cp) * (2 * shape.cp)),
                 round_up(o.bin, 2 * shape.cp));
  if (documents.vocab_size > config.vocab_size)
    problems.add("{} has tokens of a vocabulary of {}, the model of {}", o.input,
                 documents.vocab_size, config.vocab_size);
  std::string headline = "impossible configuration";
  const auto grids = nearest_grids(shape, ranks, allowed_tensor_parallel(config, ranks));
  for (size_t i = 0; i < std::min<size_t>(3, grids.size()) && !problems.empty(); ++i)
    headline += fmt::format("{}{}", i == 0 ? "; the nearest grids of this run's ranks: " : " | ",
                            to_string(grids[i]));
  problems.throw_if_any(headline);
  return shape;
}

/// Table, lines and files, on rank 0.
void present(const Options& o, RunReport& report, const ScoringRow& row, const Samples& samples_ms,
             const std::string& details, const Compression& compression) {
  add_row(report, row, samples_ms, compression);
  const Table<ScoringRow>& table = scoring_table();
  fmt::print("{}{}{}{}", table.header(), table.row(row), details, footer_text(report));
  if (!o.csv.empty()) write_file_atomically(o.csv, table.csv({row}));
  if (!o.json.empty()) write_json(report, o.json);
}

/// Everything that a run works on, checked.
struct Job {
  Documents documents;
  ModelFile model;
  GridShape shape;
  ScoringPlan plan;
  DocumentView view() const { return {documents.tokens, documents.offsets}; }
};

RunReport start_report(const Options& o, const Job& job, AppContext& context) {
  RunReport report = begin_report(context,
                                  {{"documents", job.documents.count()},
                                   {"tokens", job.plan.tokens},
                                   {"bin", job.plan.capacity},
                                   {"grid", to_string(job.shape)},
                                   {"schedule", o.schedule},
                                   {"parameters", job.model.config().parameters()},
                                   {"dtype", "f32"},
                                   {"iters", int64_t{o.iterations}},
                                   {"warmup", int64_t{o.warmup}},
                                   {"check", o.check}},
                                  {{"hdf5", h5::library_version()}});
  report.inputs = {{o.input, sha256_of_file(context.world, o.input)},
                   {o.model, sha256_of_file(context.world, o.model)}};
  report.verification = Verification(o.tol_scale);
  if (context.root() && !context.quiet) fmt::print("{}", header_text(report));
  std::fflush(stdout);
  return report;
}

/// Measures, verifies, writes and reports.
ExitCode score(const Options& o, Job& job, std::optional<OutputFile>& output, AppContext& context) {
  Communicator& world = context.world;
  const ModelConfig& config = job.model.config();
  RunReport report = start_report(o, job, context);
  ProcessGrid grid(world, job.shape);
  HostStream stream;
  const auto kernel = make_cpu_kernel();
  Decoder decoder(config, load_weights(config, job.shape.tp, grid.tp_rank(), weights_of(job.model)),
                  grid, *kernel, stream);
  Scorer scorer(job.view(), job.plan, find_schedule(o.schedule), grid);
  const Passes passes = measure_passes(scorer, decoder, grid, o.iterations, o.warmup);
  const ScoreRange mine = scorer.in_document_order();
  const Samples samples_ms = gather_samples(world, passes.milliseconds);
  ScoringRow row = make_row(job.plan, scorer, passes, samples_ms, config, o.schedule, grid);
  std::string details = phases_text(passes, world);
  if (context.verbose) details += ranks_text(passes, scorer, world);
  if (o.check != "none") {
    details += verify_scores({job.documents, config, job.shape.cp, report.verification},
                             {o.input, job.model, report.inputs[1].sha256, o.check_tokens}, scorer,
                             decoder, mine, world);
    row.check = report.verification.passed() ? "ok" : "FAILED";
    row.error_over_tolerance = report.verification.max_error_over_tolerance();
  }
  if (output && row.check != "FAILED")
    write_results(*output,
                  make_results_header(report, job.documents, job.shape, job.plan, o.schedule),
                  std::vector<ResultPiece>{{mine.begin, mine.logprob, mine.entropy}});
  const auto scores = score_documents(mine, prediction_offsets(job.documents.offsets), world);
  details += compression_text(job.documents, scores, o.top);
  if (context.quiet) details.clear();
  run_on_root(world, "report", [&] {
    present(o, report, row, samples_ms, details, compression_of(job.documents, scores));
  });
  return exit_code_of(judge(report));
}

ExitCode run(Options& o, AppContext& context) {
  Communicator& world = context.world;
  Job job{read_documents(world, o.input), ModelFile(world, o.model), {}, {}};
  run_agreed(world, "configuration", [&] {
    job.shape = choose_grid(o, job.model.config(), job.documents, world.size());
    job.plan = plan_scoring(job.view(), job.model.config(), job.shape, o.bin);
  });
  if (o.dry_run) {
    if (context.root())
      fmt::print("{}",
                 dry_run_text(job.plan, job.model.config(), job.shape, find_schedule(o.schedule)));
    return ExitCode::ok;
  }
  // Places that cannot be written are refused before any work.
  run_on_root(world, "outputs", [&] {
    check_output_places({{"--output", o.output}, {"--json", o.json}, {"--csv", o.csv}},
                        {{"--input", o.input}, {"--model", o.model}});
  });
  std::optional<OutputFile> output;
  if (!o.output.empty()) output.emplace(world, o.output);
  return score(o, job, output, context);
}

}  // namespace

int main(int argc, char** argv) {
  Options options;
  const AppInfo info{"gyre-pipeline",
                     "Scores documents with a decoder: per-token log-probability and entropy.",
                     "Example: mpirun -n 4 gyre-pipeline --input docs.h5 --model inputs/model.h5 "
                     "--cp 2 --tp 2 -o scores.h5"};
  return run_app(
      argc, argv, info, [&](CLI::App& app) { declare(app, options); },
      [&](AppContext& context) { return run(options, context); });
}
