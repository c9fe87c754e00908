#include "apps/pipeline/options.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <limits>
#include <tuple>

#include "core/error.hpp"

namespace gyre {
namespace {

/// Checks the grid first of all. Returns false if nothing can be planned for
/// such a grid.
bool check_grid(const PipelineOptions& o, const GridShape& grid, const ModelConfig& config,
                int ranks, ConfigErrors& errors) {
  check_tensor_parallel(config, grid.tp, errors);
  const bool possible = errors.empty();
  const int64_t wanted = int64_t{grid.dp} * grid.cp * grid.tp;
  if (!o.dry_run && wanted != ranks)
    errors.add("{} is {} ranks, but the run has {}", to_string(grid), wanted, ranks);
  return possible;
}

/// Checks the bin's size; `setup` gives the number that must divide it.
bool check_bin(int64_t bin, const ScoringSetup& setup, ConfigErrors& errors) {
  const int64_t multiple = setup.slot_multiple();
  constexpr int64_t most = std::numeric_limits<int32_t>::max();
  if (bin > most)
    errors.add("--bin {}: at most {}, the int32 range of cu_seqlens", bin,
               most / multiple * multiple);
  else if (bin % multiple != 0)
    errors.add("--bin {} is not a multiple of {} = {}; the nearest {}", bin,
               multiple_text(multiple / setup.grid.cp), multiple,
               bin < multiple ? fmt::format("is {}", multiple)
                              : fmt::format("are {} and {}", bin / multiple * multiple,
                                            round_up(bin, multiple)));
  else
    return true;
  return false;
}

/// Tries the layouts and the schedule on the first bin.
void check_first_bin(const ScoringPlan& plan, const ModelConfig& config, ConfigErrors& errors) {
  if (plan.bins.empty()) return;
  const Schedule& schedule = *plan.setup.schedule;
  try {
    const BinLayout layout = plan.layout_of(plan.bins.front());
    for (size_t m = 0; m < plan.masks.size(); ++m) {
      const std::string reason = schedule.why_not(plan.problem(layout, config, m));
      if (!reason.empty()) errors.add("schedule {}: {}", schedule.name, reason);
    }
    const std::string reason =
        plan.recurrent_layers > 0 ? recurrent_refusal(plan.recurrent_problem(layout, config)) : "";
    if (!reason.empty())
      errors.add("--recurrent-layout {}, --state-schedule {}: {}", layout.recurrent.name,
                 plan.setup.state_schedule->name, reason);
  } catch (const Error& error) {
    if (error.code() != ExitCode::usage) throw;
    errors.add("{}", error.what());
  }
}

/// Checks what goes with recurrent layers alone, and what does not go with them.
void check_recurrent(const PipelineOptions& o, const ModelConfig& config, ConfigErrors& errors) {
  const PipelineOptions usual;
  const bool recurs = config.recurrent_layers() > 0;
  for (const auto& [option, given, not_given] :
       {std::tuple{"--recurrent-layout", o.recurrent_layout, usual.recurrent_layout},
        {"--state-schedule", o.state_schedule, usual.state_schedule}})
    if (!recurs && given != not_given)
      errors.add("{} {}: the model has no recurrent layers", option, given);
  if (recurs && o.backend.on_gpu())
    errors.add("the model has {} recurrent layers, which need --backend cpu",
               config.recurrent_layers());
}

/// Checks that divergences of `model` from `teacher` are defined and can be computed.
void check_teacher(const PipelineOptions& o, const TeacherModel& teacher, const ModelFile& model,
                   ConfigErrors& errors) {
  if (teacher.config.vocab_size != model.config().vocab_size)
    errors.add(
        "--teacher {} has a vocabulary of {}, --model {} of {}: a divergence is of two "
        "distributions over the same tokens",
        o.teacher, teacher.config.vocab_size, o.model, model.config().vocab_size);
  const std::string &of_teacher = teacher.file.tokenizer(), &of_model = model.tokenizer();
  if (!of_teacher.empty() && !of_model.empty() && of_teacher != of_model)
    errors.add("--teacher {} has the tokenizer {}, --model {} the tokenizer {}", o.teacher,
               of_teacher, o.model, of_model);
  if (o.backend.on_gpu())
    errors.add("--teacher needs --backend cpu; divergences are not computed on a GPU");
}

}  // namespace

void declare_options(OptionTable& table, PipelineOptions& o) {
  const AddOptions add(table, "Problem"), ranks(table, "Parallelism"),
      measurement(table, "Measurement"), output(table, "Output");
  add("--input", "Documents (HDF5, gyre/documents), with a reference or without", o.input)
      .reads_file();
  declare_generated(table, o.generate, " Tokens are random");
  add.required("--model", "Weights (HDF5, gyre/model)", o.model).reads_file();
  add("--teacher",
      "Weights of another model (HDF5, gyre/model) of the same vocabulary: every prediction also "
      "gets the divergence KL(teacher || model), in nats",
      o.teacher)
      .reads_file();
  output("-o,--output", "Write scores here (HDF5, gyre/results)", o.output).writes_file();
  add.size("--bin", fmt::format("Slots of a bin; {}; 0: 8K, rounded up", segment_rule_help()),
           o.bin);
  declare_prefix_options(table, o.prefixes);
  ranks("--dp", "Data-parallel replicas", o.dp, 1, max_ranks).in_key();
  ranks("--cp", "Context-parallel ranks; 0: all that dp and tp leave", o.cp, 0, max_ranks).in_key();
  ranks("--tp", "Tensor-parallel ranks", o.tp, 1, max_ranks).in_key();
  ranks.flag("--auto",
             "Run the schedule and the layout that the model of --machine predicts to be the "
             "fastest, of recurrent layers too; what is given other than a default stays",
             o.automatic);
  layout_choices().declare(table, o.layout, "Who owns which slots of a bin", false);
  schedule_choices().declare(table, o.schedule, "How queries meet the keys of other ranks", false);
  ranks.choice("--recurrent-layout", "The layout of recurrent layers", o.recurrent_layout,
               names_of(layout_kinds()));
  ranks.choice("--state-schedule", "How states of recurrent layers pass from rank to rank",
               o.state_schedule, names_of(state_schedules()));
  const std::vector<std::string> types = activation_type_names();
  add.choice("-d,--dtype", "Type of weights and activations; sums and logits are f32", o.dtype,
             types);
  add.choice("--residual", "Type of the residual stream, with --dtype bf16", o.residual, types);
  declare_backend_options(table, o.backend);
  declare_repeats(table, "Timed passes over all documents", o.repeats);
  measurement("-w,--warmup",
              "Untimed passes before the timed ones; "
              "at least one, with checked messages, where results are verified",
              o.warmup, 0);
  measurement.choice("-c,--check", "Verify the last pass, or nothing", o.check, {"none", "last"});
  measurement.size("--check-tokens", "Without a reference: tokens that the serial twin scores",
                   o.check_tokens, 2);
  measurement("--check-seconds",
              "Without a reference: seconds that the serial twin may take, about", o.check_seconds,
              positive);
  measurement("--tol-scale", "Factor of all tolerances", o.tol_scale, positive);
  output("--top", "List the documents that cost most bits", o.top, 0);
  declare_report_options(
      table, o.report,
      {"tokens_per_s", "tokens_per_s_per_rank", "share_of_limit", "bits_per_byte", "mean_entropy"});
  output.flag("--dry-run",
              "Show sizes, bytes and memory of the grid and stop; any grid, any number of ranks",
              o.dry_run);
}

ScoringSetup PipelineOptions::setup(int ranks) const {
  const int64_t others = int64_t{dp} * tp;
  const int rest = static_cast<int>(std::max<int64_t>(1, ranks / others));
  ScoringSetup setup;
  setup.grid = {dp, cp > 0 ? cp : rest, tp};
  setup.layout = &find_layout(layout.name);
  setup.layout_options = layout.for_ranks(setup.grid.cp);
  setup.schedule = &find_schedule(schedule.name);
  setup.schedule_options = schedule.options;
  setup.types = {activation_type(dtype), activation_type(residual)};
  setup.recurrent_layout = &find_layout(recurrent_layout);
  setup.state_schedule =
      &*std::ranges::find(state_schedules(), state_schedule, &StateSchedule::name);
  return setup;
}

ScoringPlan make_plan(const PipelineOptions& o, const ModelConfig& config,
                      const std::string& tokenizer, const Documents& documents, int ranks) {
  const ScoringSetup setup = o.setup(ranks);
  ConfigErrors errors;
  const bool grid_possible = check_grid(o, setup.grid, config, ranks, errors);
  const size_t of_grid = errors.messages().size();
  layout_choices().check(o.layout, errors);
  schedule_choices().check(o.schedule, errors);
  check_prefix_options(o.prefixes, errors);
  check_recurrent(o, config, errors);
  const int64_t multiple = setup.slot_multiple();
  const int64_t bin = o.bin > 0 ? o.bin : round_up(8192, multiple);
  const bool bin_possible = check_bin(bin, setup, errors);
  if (documents.vocab_size > config.vocab_size)
    errors.add("{} has tokens of a vocabulary of {}, the model of {}", o.input,
               documents.vocab_size, config.vocab_size);
  if (!tokenizer.empty() && documents.tokenizer != tokenizer)
    errors.add("{} has tokens of the tokenizer {}, the model of {}", o.input, documents.tokenizer,
               tokenizer);
  if (o.residual == "bf16" && o.dtype != "bf16") errors.add("--residual bf16 needs --dtype bf16");
  if (!o.output.empty() && o.report.resume != "none")
    errors.add("--resume leaves rows out, and --output needs them");
  ScoringPlan plan;
  if (grid_possible && bin_possible) {
    plan = plan_scoring(documents.offsets,
                        o.prefixes.forest_of({documents.tokens, documents.offsets}, bin), config,
                        setup, bin);
    if (o.dry_run) check_scoring_size(plan, documents.offsets, config, false);
    check_first_bin(plan, config, errors);
  }
  std::string headline = "impossible configuration";
  const auto grids = nearest_grids(setup.grid, ranks, allowed_tensor_parallel(config, ranks));
  const size_t shown = of_grid > 0 ? std::min<size_t>(3, grids.size()) : 0;
  for (size_t i = 0; i < shown; ++i)
    headline += fmt::format("{}{}", i == 0 ? "; the nearest grids of this run's ranks: " : " | ",
                            to_string(grids[i]));
  errors.throw_if_any(headline);
  return plan;
}

TeacherModel make_teacher(const PipelineOptions& o, ModelFile file, const ModelFile& model,
                          const Documents& documents, ScoringPlan& plan) {
  TeacherModel teacher{std::move(file), {}, {}};
  teacher.config = teacher.file.config();
  teacher.config.vocab_padded = model.config().vocab_padded;
  ConfigErrors errors;
  check_teacher(o, teacher, model, errors);
  check_tensor_parallel(teacher.config, plan.setup.grid.tp, errors, "teacher");
  if (errors.empty()) {
    teacher.plan = plan_teacher(plan, model.config(), teacher.config, documents.offsets);
    check_first_bin(teacher.plan, teacher.config, errors);
  }
  errors.throw_if_any("impossible configuration");
  return teacher;
}

}  // namespace gyre
