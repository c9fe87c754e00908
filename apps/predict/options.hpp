#pragma once
// Options of gyre-predict.

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "apps/common/registry_options.hpp"
#include "apps/common/workload_options.hpp"
#include "recurrence/schedules/schedule.hpp"
#include "report/app.hpp"
#include "report/options.hpp"

namespace gyre {

/// Options of gyre-predict; see --help.
struct PredictOptions {
  std::string machine, model, recurrence,
      state_schedule = "all", recurrent_layout = default_recurrent_layout().name, input,
      cp_list = "8", generate, pass, dtype = "bf16", partial_out = "f32", partial_dq = "f32",
      wire_dkv, svg, trace, goal, chakra;
  std::vector<std::string> links;  ///< "switch=25G": replaces the machine's rate
  MaskOptions mask;
  ScheduleChoice schedule;
  PrefixChoice prefixes;
  LayoutChoice layout;
  int dp = 1, tp = 1, heads = 0, kv_heads = 0, key_heads = 0, head_dim = 0, v_head_dim = 0,
      shared_key_dim = 0, conv = 0, batch = 1, seeds = 1;
  TokenSweep sweep = {65536};
  int64_t capacity = 0;
  ReportOptions report;

  std::vector<int> cps;  ///< values of cp_list, set by check_options

  /// The heads of one tensor-parallel rank.
  HeadShape head_shape() const;
  ElementTypes types() const;
  /// The heads of --recurrence of one tensor-parallel rank.
  RecurrenceShape recurrence_shape() const;
  /// The chosen schedules, of attention or of states.
  const std::string& schedules() const {
    return recurrence.empty() ? schedule.name : state_schedule;
  }
  bool has_several() const { return lists_several(schedules()) || layout.several(); }
  bool has_several_of_states() const {
    return lists_several(state_schedule) || lists_several(recurrent_layout);
  }
  /// The outputs that show one configuration of attention: option, value.
  std::vector<std::pair<const char*, const std::string*>> of_one_configuration() const {
    return {{"--trace", &trace}, {"--goal", &goal}, {"--chakra", &chakra}};
  }
  bool wants(Pass wanted) const { return pass == "both" || pass == name_of(wanted); }
};

void declare_options(OptionTable& table, PredictOptions& o);

/// Names of the figures of merit of a run with these options.
std::vector<std::string> metrics_of(const PredictOptions& o);

/// Fills in defaults. Throws a usage error that lists all problems of the options in a run of
/// `ranks` ranks.
void check_options(PredictOptions& o, int ranks);

}  // namespace gyre
