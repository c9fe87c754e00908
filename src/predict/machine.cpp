#include "predict/machine.hpp"

#include <algorithm>
#include <cmath>

#include "core/error.hpp"

namespace gyre {
namespace {

void require_rate(const char* name, double value) {
  if (!(value >= 1)) throw_usage("{} of {}; wanted: at least 1", name, value);
}
void require_amount(const char* name, double value) {
  if (!(value >= 0) || std::isinf(value)) throw_usage("{} of {}; wanted: 0 or more", name, value);
}

/// Message sizes must ascend: `last` is the previous size, and becomes this one.
void require_more(double bytes, double& last) {
  if (!(bytes > last) || std::isinf(bytes))
    throw_usage("message_bytes of {} behind {}; wanted: more", bytes, last);
  last = bytes;
}

void check_tier(const LinkTier& tier) {
  require_rate("bytes_per_s", tier.bytes_per_s);
  require_amount("latency_s", tier.latency_s);
  require_amount("kernel_slowdown", tier.kernel_slowdown);
  if (!(tier.all_at_once > 0 && tier.all_at_once <= 1))
    throw_usage("all_at_once of {}; wanted: more than 0, at most 1", tier.all_at_once);
  double last = 0;
  for (const auto& [bytes, rate] : tier.curve) {
    require_more(bytes, last);
    require_rate("bytes_per_s", rate);
  }
}

/// Each tier but the last joins a fixed number of ranks, a multiple of the tier inside it.
void check_tiers(const std::vector<LinkTier>& links) {
  int inner = 1;
  for (size_t i = 0; i < links.size(); ++i) {
    const LinkTier& tier = links[i];
    const bool last = i + 1 == links.size();
    if (tier.ranks < 0 || (tier.ranks == 0 && !last))
      throw_usage("ranks of {} in tier {}; wanted: a multiple of {}, or none for the last tier",
                  tier.ranks, tier.name, inner);
    if (tier.ranks != 0 && (tier.ranks % inner != 0 || (tier.ranks == inner && i > 0)))
      throw_usage(
          "ranks of {} in tier {}; wanted: a multiple of the tier inside, {}, the nearest {}",
          tier.ranks, tier.name, inner, std::max(2, tier.ranks / inner) * inner);
    check_tier(tier);
    inner = tier.ranks;
  }
}

void check_kernel(const KernelSurface& kernel) {
  require_amount("launch_s", kernel.launch_s);
  require_amount("diagonal_s", kernel.diagonal_s);
  require_amount("merge_s", kernel.merge_s);
  if (kernel.head_dim < 1) throw_usage("head_dim of {}; wanted: 1 or more", kernel.head_dim);
  check_surface(kernel, "keys");
}

void check_recurrence(const RecurrenceRate& rate) {
  require_amount("launch_s", rate.launch_s);
  require_amount("scan_s", rate.scan_s);
  require_rate("flops_per_s", rate.flops_per_s);
  if (rate.summary_flops_per_s != 0) require_rate("summary_flops_per_s", rate.summary_flops_per_s);
}

void check_decoder(const DecoderModel& decoder) {
  for (const LinearSurface& linear : decoder.linears) {
    require_amount("launch_s", linear.launch_s);
    check_surface(linear, "columns");
  }
  require_rate("elementwise_bytes_per_s", decoder.elementwise_bytes_per_s);
  require_rate("logprob_bytes_per_s", decoder.logprob_bytes_per_s);
  require_amount("logprob_row_s", decoder.logprob_row_s);
  for (const CollectiveTimes& times : decoder.all_reduces) {
    if (times.ranks < 2)
      throw_usage("ranks of {} in an all-reduce; wanted: 2 or more", times.ranks);
    double last = 0;
    for (const auto& [bytes, seconds] : times.points) {
      require_more(bytes, last);
      require_amount("seconds", seconds);
    }
  }
}

}  // namespace

double LinkTier::seconds(double bytes) const {
  const auto at = [this](const RatePoint& p) { return p.bytes / (p.bytes_per_s * all_at_once); };
  if (curve.empty()) return bytes / (bytes_per_s * all_at_once);
  const auto above = std::find_if(curve.begin(), curve.end(),
                                  [&](const RatePoint& p) { return p.bytes >= bytes; });
  if (above == curve.end()) return bytes / (curve.back().bytes_per_s * all_at_once);
  if (above == curve.begin()) return bytes / (above->bytes_per_s * all_at_once);
  const RatePoint& below = *(above - 1);
  const double share = (bytes - below.bytes) / (above->bytes - below.bytes);
  return at(below) + share * (at(*above) - at(below));
}

double MachineModel::error_of(Pass pass, int ranks) const {
  for (const PredictionError& error : errors)
    if (error.pass == pass && error.several_ranks == (ranks > 1)) return error.share;
  return std::numeric_limits<double>::quiet_NaN();
}

int MachineModel::tier_between(int64_t a, int64_t b) const {
  for (size_t i = 0; i + 1 < links.size(); ++i)
    if (a / links[i].ranks == b / links[i].ranks) return static_cast<int>(i);
  return static_cast<int>(links.size()) - 1;
}

MachineModel flat_machine(double flops_per_s, double bytes_per_s, double latency_s) {
  MachineModel machine;
  machine.kernel.flops_per_s = flops_per_s;
  machine.links.emplace_back();
  machine.links.back().bytes_per_s = bytes_per_s;
  machine.links.back().latency_s = latency_s;
  return machine;
}

void check_machine(const MachineModel& machine) {
  require_rate("flops_per_s", machine.kernel.flops_per_s);
  require_rate("copy_bytes_per_s", machine.copy_bytes_per_s);
  if (machine.kernel_bytes_per_s != 0)
    require_rate("kernel_bytes_per_s", machine.kernel_bytes_per_s);
  require_amount("memory_bytes", machine.memory_bytes);
  require_amount("order_margin", machine.order_margin);
  for (const PredictionError& error : machine.errors) require_amount("share", error.share);
  check_tiers(machine.links);
  for (const KernelSurface& surface : machine.kernel.surfaces) check_kernel(surface);
  for (const RecurrenceRate& rate : machine.recurrence.rates) check_recurrence(rate);
  check_decoder(machine.decoder);
}

}  // namespace gyre
