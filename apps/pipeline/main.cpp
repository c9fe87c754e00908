// gyre-pipeline: documents in, per-token log-probabilities and entropies out,
// on a dp × cp × tp grid.

#include <fmt/format.h>

#include <memory>
#include <optional>
#include <utility>

#include "apps/common/packed_streams.hpp"
#include "apps/pipeline/forecast.hpp"
#include "apps/pipeline/options.hpp"
#include "apps/pipeline/phases.hpp"
#include "apps/pipeline/report.hpp"
#include "attention/kernels/make_kernel.hpp"
#include "comm/agree.hpp"
#include "comm/process_grid.hpp"
#include "harness/suite.hpp"
#include "io/schemas/model_file.hpp"
#include "io/schemas/results.hpp"
#include "packing/lengths.hpp"
#include "report/app.hpp"

namespace {

using namespace gyre;

/// The checked inputs of a run, and its plan.
struct Job {
  Documents documents;
  ModelFile model;
  ScoringPlan plan;
  std::optional<TeacherModel> teacher;
  double predicted_s;  ///< of a pass; NaN: unknown
  const GridShape& shape() const { return plan.setup.grid; }
};

RunReport start_report(const PipelineOptions& o, const Job& job,
                       const std::optional<Reference>& reference, const Backend& backend,
                       AppContext& context) {
  Fields facts = {{"documents", job.documents.count()},
                  {"tokens", job.plan.tokens},
                  {"bin", job.plan.capacity},
                  {"grid", to_string(job.shape())},
                  {"parameters", job.model.config().parameters()}};
  if (job.teacher) facts.emplace_back("teacher_parameters", job.teacher->config.parameters());
  if (!o.generate.empty()) facts.emplace_back("source", to_string(parse_length_spec(o.generate)));
  RunReport report = begin_report(context, facts, {{"hdf5", h5::library_version()}});
  report.verification = Verification(o.tol_scale);
  const bool has_hidden = reference && reference->has_hidden && job.plan.tokens > 0;
  if (job.plan.predictions == 0 && !has_hidden)
    report.nothing_to_verify = fmt::format("no token has a next one, in {}",
                                           count_text(job.documents.count(), "document"));
  backend.describe(report);
  start_run(context, report, o.report, 1);
  return report;
}

/// Writes the scores of all ranks to the output file. Collective.
void write_scores(const PipelineOptions& o, const Job& job, const RunReport& report,
                  const ScoreRange& mine, OutputFile output, AppContext& context) {
  ResultsHeader header = make_results_header(report, job.documents, job.plan);
  header.input_sha256 = checksum_of(report, o.input);
  header.model_sha256 = checksum_of(report, o.model);
  if (job.teacher) header.teacher_sha256 = checksum_of(report, o.teacher);
  write_results(output, header, {mine.begin, mine.logprob, mine.entropy, mine.kl});
  context.outputs.add(std::move(output));
}

ScoringInputs inputs_of(const PipelineOptions& o, Job& job,
                        const std::optional<Reference>& reference, const RunReport& report) {
  return {.documents = job.documents,
          .input = o.input,
          .reference = reference,
          .model = job.model,
          .model_sha256 = checksum_of(report, o.model),
          .teacher = job.teacher ? &*job.teacher : nullptr,
          .predicted_s = job.predicted_s,
          .check_tokens = o.check_tokens,
          .check_seconds = o.check_seconds};
}

/// Measures, verifies, writes and reports.
ExitCode score(const PipelineOptions& o, Job& job, std::optional<OutputFile>& output,
               Backend& backend, AppContext& context) {
  Communicator& world = context.world;
  const ModelConfig& config = job.model.config();
  std::optional<Reference> reference;
  if (o.check != "none" && !o.input.empty())
    reference = read_reference(world, o.input, job.documents, hidden_shape(config));
  RunReport report = start_report(o, job, reference, backend, context);
  ProcessGrid grid(backend.world(), job.shape());
  const ScoringInputs inputs = inputs_of(o, job, reference, report);
  std::optional<ScoringCase> planned;
  run_agreed(world, "planning",
             [&] { planned.emplace(job.plan, inputs, grid, world, context.progress); });
  ScoringCase& subject = *planned;
  Suite<ScoringResult> suite(context, report, o.report, scoring_table(job.teacher.has_value()));
  if (suite.wanted({subject.row()}).empty())
    return finish_run(context, report, o.report, [] { return std::string(); });
  const DecoderTypes& types = job.plan.setup.types;
  const auto kernel = make_block_kernel(backend.stream(), {.activations = types.activations});
  const auto decoder_of = [&](const ModelConfig& of, const WeightReader& read) {
    return std::make_unique<Decoder>(
        of, types, load_weights(of, grid.shape().tp, grid.tp_rank(), read, types.activations), grid,
        *kernel, backend.stream());
  };
  const auto decoder = decoder_of(config, weights_of(job.model));
  std::unique_ptr<Decoder> of_teacher;
  if (job.teacher) of_teacher = decoder_of(job.teacher->config, job.teacher->read_weights());
  subject.set_decoders(*decoder, of_teacher.get());
  report.memory.plan(planned_bytes(job.plan, config, subject.scorer(), backend.stream().space()) +
                     teacher_bytes(subject.teacher()));
  double last_ms = 0;
  PhaseLimits limits;
  std::string details = (o.prefixes.share ? savings_text(job.plan.forest) : "") +
                        model_notes(inputs, types.activations);
  const int64_t array_bytes = job.plan.capacity / job.shape().cp * config.hidden_size * 4;
  suite.measure(subject, Pass::forward, {o.repeats, o.warmup, o.check, o.tol_scale}, backend,
                subject.row(), [&](ScoringResult& row, const Measured& measured) {
                  subject.complete(row, measured.last_ms);
                  last_ms = measured.last_ms;
                  limits = measure_limits(types.activations, array_bytes, backend.stream(), world);
                  row.share_of_limit =
                      share_of_limit(subject.work(), limits, row.time_ms.median, world);
                });
  details += forecast_text(suite.rows().front(), job.plan);
  details += phases_text(subject.times(), subject.work(), limits, last_ms, world);
  if (context.verbose) details += ranks_text(subject, world);
  details += subject.comparison_text();
  if (reference) judge_answers(report, answer_uses(*reference));
  const ScoreRange& mine = subject.scores();
  if (output) write_scores(o, job, report, mine, std::move(*output), context);
  const std::vector<DocumentScore>& scores = subject.document_scores();
  details += compression_text(job.documents, scores, o.top, job.teacher.has_value());
  add_figures(report, suite.rows().front(), compression_of(job.documents, scores),
              config.vocab_size);
  return finish_run(context, report, o.report,
                    [&] { return suite.legend() + (context.quiet ? "" : details); });
}

ExitCode run(PipelineOptions& o, AppContext& context) {
  Communicator& world = context.world;
  run_agreed(world, "options", [&] {
    if (o.dry_run) refuse_report_options(context, "--dry-run");
    if (o.input.empty() == o.generate.empty())
      throw_usage("one of --input and --gen is needed, and not both");
  });
  Documents documents;
  if (!o.input.empty()) documents = read_documents(world, o.input);
  ModelFile model(world, o.model);
  run_agreed(world, "drawing documents", [&] {
    if (o.input.empty())
      documents = generate_documents(o.generate, model.config().vocab_size, model.tokenizer(),
                                     memory_for_rank(context));
  });
  Job job{std::move(documents), std::move(model), {}, {}, 0};
  const ModelConfig& config = job.model.config();
  job.predicted_s = forecast_pass(o, {config, job.model.tokenizer(), job.documents}, context);
  run_agreed(world, "configuration", [&] {
    job.plan = make_plan(o, config, job.model.tokenizer(), job.documents, world.size());
  });
  std::optional<ModelFile> teacher;
  if (!o.teacher.empty()) teacher.emplace(world, o.teacher);
  run_agreed(world, "configuration of the teacher", [&] {
    if (teacher)
      job.teacher.emplace(make_teacher(o, std::move(*teacher), job.model, job.documents, job.plan));
  });
  if (o.dry_run) {
    context.outputs.print(
        dry_run_text(job.plan, config) +
        (job.teacher ? teacher_text(job.teacher->plan, job.teacher->config, config) : "") +
        length_note(job.documents, job.model.longest_text()) +
        (o.prefixes.share ? savings_text(job.plan.forest) : ""));
    return ExitCode::ok;
  }
  Backend backend(context, o.backend);
  plan_outputs(context);
  std::optional<OutputFile> output;
  if (!o.output.empty()) output.emplace(world, o.output);
  return score(o, job, output, backend, context);
}

}  // namespace

int main(int argc, char** argv) {
  PipelineOptions options;
  const AppInfo info{"gyre-pipeline",
                     "Scores documents with a decoder: per-token log-probability and entropy.",
                     "Example: mpirun -n 4 gyre-pipeline --input docs.h5 --model model.h5 --tp 2"};
  return run_app(
      argc, argv, info, [&](OptionTable& table) { declare_options(table, options); },
      [&](AppContext& context) { return run(options, context); });
}
