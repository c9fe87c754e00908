#include "packing/compatibility.hpp"

#include "core/error.hpp"
#include "core/label.hpp"

namespace gyre {
namespace {

/// The first capability that packed attention lacks, or nullptr.
const char* missing_capability(const ParallelSetup& setup) {
  if (!setup.attention.varlen) return "segments of different lengths (varlen)";
  if (setup.padding && !setup.attention.padded_offsets)
    return "padding between segments (padded offsets)";
  if (setup.cp > 1 && !setup.attention.cp_aware) return "context parallelism";
  return nullptr;
}

bool gradient_known_wrong(const ParallelSetup& setup) {
  if (setup.probe != GradientProbe::not_run) return setup.probe == GradientProbe::differs;
  return setup.device == DeviceCapability{12, 0};
}

Compatibility error(int rule, std::string message) {
  return {Compatibility::Level::error, rule, std::move(message)};
}

}  // namespace

Compatibility check_compatibility(const ParallelSetup& setup) {
  if (setup.cp < 1) throw_usage("cp must be at least 1, not {}", setup.cp);
  if (setup.linear_attention && (setup.packed || setup.cp > 1))
    return error(4, fmt::format("linear-attention layers carry a state over the whole row: {} is "
                                "not possible; use unpacked rows with cp 1",
                                setup.packed ? "packing" : fmt::format("cp {}", setup.cp)));
  if (!setup.packed) {
    if (setup.cp == 1) return {};
    return error(1, fmt::format("unpacked rows with cp {}: the padding mask cannot be honoured and "
                                "gradients become NaN; pack the rows or use cp 1",
                                setup.cp));
  }
  if (const char* missing = missing_capability(setup))
    return error(2, fmt::format("packed rows with cp {}: this attention does not support {}; "
                                "choose one that does, or unpacked rows with cp 1",
                                setup.cp, missing));
  if (setup.fused_flag == "0") return {};
  if (gradient_known_wrong(setup)) {
    const std::string finding =
        fmt::format("packed rows: the fused attention gradient of this device {}",
                    setup.probe == GradientProbe::differs ? "differs from the reference"
                                                          : "(12.0) is known to be wrong");
    if (setup.forward_only) return {Compatibility::Level::warning, 0, finding};
    return error(3, finding + "; turn fused attention off");
  }
  if (setup.probe == GradientProbe::agrees) return {};
  return {Compatibility::Level::warning, 0,
          "packed rows: "
          "the fused attention gradient of this device was not compared with a reference"};
}

Compatibility require_compatible(const ParallelSetup& setup) {
  Compatibility result = check_compatibility(setup);
  if (result.level == Compatibility::Level::error) throw_usage("{}", result.message);
  return result;
}

void check_mask_contract(bool sharded, AttentionMask mask, int64_t segments) {
  if (!sharded) return;
  switch (mask) {
    case AttentionMask::causal_segments:
      return;
    case AttentionMask::causal:
      if (segments > 1)
        throw_usage(
            "a causal mask without segment boundaries over {} segments: they would see each other; "
            "use causal with segments",
            segments);
      return;
    case AttentionMask::full:
    case AttentionMask::dense:
      throw_usage(
          "a {} attention mask under context parallelism; causal and causal with segments are "
          "possible, other attention must run unsharded",
          mask == AttentionMask::dense ? "dense" : "full");
  }
}

LossSums sum_losses(std::span<const float> losses, std::span<const int64_t> labels) {
  if (losses.size() != labels.size())
    throw_usage("{} losses and {} labels; they must be equally many", losses.size(), labels.size());
  LossSums sums;
  for (size_t t = 0; t < losses.size(); ++t)
    if (labels[t] != ignored_label) sums += {losses[t], 1};
  return sums;
}

double mean_loss(std::span<const LossSums> ranks) {
  LossSums total;
  for (const LossSums& rank : ranks) total += rank;
  if (total.tokens == 0)
    throw_usage("no token of {} ranks is supervised: every label is {}", ranks.size(),
                ignored_label);
  return total.loss / total.tokens;
}

}  // namespace gyre
