#pragma once
// Options of gyre-pipeline.

#include <string>

#include "apps/common/registry_options.hpp"
#include "apps/common/workload_options.hpp"
#include "apps/pipeline/case.hpp"
#include "harness/backend.hpp"
#include "io/schemas/documents.hpp"
#include "model/scoring.hpp"
#include "report/options.hpp"

namespace gyre {

/// Options of gyre-pipeline; see --help.
struct PipelineOptions {
  std::string input, generate, model, teacher, output, check = "last", dtype = "f32",
                                                       residual = "f32";
  LayoutChoice layout;
  ScheduleChoice schedule;
  std::string recurrent_layout = default_recurrent_layout().name,
              state_schedule = state_schedules().front().name;
  PrefixChoice prefixes;
  int dp = 1, cp = 0, tp = 1, warmup = 0, top = 0;
  int64_t bin = 0, check_tokens = 4096;
  double tol_scale = 1, check_seconds = 10;
  RepeatOptions repeats;
  ReportOptions report;
  bool dry_run = false, automatic = false;
  BackendOptions backend;

  /// The setup for a run of `ranks` ranks.
  ScoringSetup setup(int ranks) const;
};

void declare_options(OptionTable& table, PipelineOptions& o);

/// Packs `documents` by the options for a run of `ranks` ranks. Throws a usage
/// error that lists all problems: incompatible options, a grid that the model or
/// the run does not admit (with the nearest ones), documents of another
/// tokenizer than the model's (empty: the model names none), a layout or
/// schedule that refuses the first bin. Planning finds refusals of later bins.
ScoringPlan make_plan(const PipelineOptions& o, const ModelConfig& config,
                      const std::string& tokenizer, const Documents& documents, int ranks);

/// Pads the vocabulary of the teacher in `file` as the model's, and plans its pass over the bins of
/// `plan`, which make_plan() made; the replicas of these bins change. Throws a usage error that
/// lists all problems: another vocabulary than the model's, a grid that the teacher does not admit,
/// a backend without divergences, a schedule that refuses the first bin.
TeacherModel make_teacher(const PipelineOptions& o, ModelFile file, const ModelFile& model,
                          const Documents& documents, ScoringPlan& plan);

}  // namespace gyre
