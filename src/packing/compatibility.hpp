#pragma once
// Checks before a run which combinations of packing, context parallelism and attention are sound.
//
//     packed  cp   attention              fused    device             result
//     no      1    any                    any      any                ok
//     no      >1   any                    any      any                error 1
//     yes     any  lacks a capability     any      any                error 2
//     yes     any  has all                "0"      any                ok
//     yes     any  has all                else     gradient is wrong  error 3
//     yes     any  has all                else     not known          warning
//     yes     any  has all                else     gradient is right  ok
//
// The first row that applies counts; "fused" is NVTE_FUSED_ATTN. Padded offsets are needed only
// where there is padding between segments; with cp > 1 there usually is, because segments are
// rounded up. These checks go by capabilities and a probe where NeMo's
// validate_parallelism_compatibility goes by a backend's name and a list of devices.

#include <cstdint>
#include <optional>
#include <span>
#include <string>

namespace gyre {

/// What an attention implementation can do.
struct AttentionCapabilities {
  bool varlen = false;          ///< segments of different lengths in one stream (cu_seqlens)
  bool padded_offsets = false;  ///< padding between segments (cu_seqlens_padded)
  bool cp_aware = false;        ///< exchanges keys and values among context-parallel ranks
};

/// The capability of a CUDA device, e.g. (9, 0).
struct DeviceCapability {
  int major = 0;
  int minor = 0;
  friend bool operator==(const DeviceCapability&, const DeviceCapability&) = default;
};

/// Result of comparing the fused backward with a reference on this device.
enum class GradientProbe { not_run, agrees, differs };

struct ParallelSetup {
  bool packed = false;
  bool padding = true;  ///< between segments; without it no padded offsets are needed
  int cp = 1;
  AttentionCapabilities attention;
  /// Value of the environment variable NVTE_FUSED_ATTN; only "0" turns fused attention off.
  std::optional<std::string> fused_flag;
  /// Decides when no probe was run: the fused THD backward of (12, 0) is known to be wrong.
  std::optional<DeviceCapability> device;
  GradientProbe probe = GradientProbe::not_run;
  bool forward_only = false;      ///< error 3 becomes a warning
  bool linear_attention = false;  ///< hybrid model: error 4 if packed or cp > 1 (checked first)
};

struct Compatibility {
  enum class Level { ok, warning, error };
  Level level = Level::ok;
  int rule = 0;         ///< 1 to 4 with an error, else 0
  std::string message;  ///< empty if ok
};

/// Evaluates the table above. Throws a usage error for cp < 1.
Compatibility check_compatibility(const ParallelSetup& setup);
/// Throws a usage error with the message if the level is error; returns the result otherwise.
Compatibility require_compatible(const ParallelSetup& setup);

/// Mask that the caller of attention asks for.
enum class AttentionMask {
  causal,           ///< earlier positions of the stream
  causal_segments,  ///< earlier positions of the same segment
  full,             ///< all positions
  dense,            ///< an array [queries, keys]
};
/// Under context parallelism only masks that follow from positions and segment boundaries are
/// allowed: causal and causal_segments. Other masks are a usage error, never replaced by a causal
/// mask; attention that needs them (an image tower) has to run unsharded. `segments` is the number
/// of segments of the stream: plain causal attention over several would let them see each other.
/// Unsharded attention takes any mask.
void check_mask_contract(bool sharded, AttentionMask mask, int64_t segments = 1);

/// Contribution of one rank to a mean loss. Ranks reduce sums: a mean of means would give tokens of
/// ranks with few tokens a larger weight.
struct LossSums {
  double loss = 0;     ///< Σ over labels other than ignored_label
  int64_t tokens = 0;  ///< number of those labels
  LossSums& operator+=(const LossSums& other) {
    loss += other.loss;
    tokens += other.tokens;
    return *this;
  }
};
/// Sums losses over labels, [slots] each. Losses of ignored slots are not read and may be NaN.
/// Throws a usage error when the lengths differ.
LossSums sum_losses(std::span<const float> losses, std::span<const int64_t> labels);

/// Σ loss / Σ tokens over all context- and data-parallel ranks. A rank may have no tokens; if none
/// has any, a usage error is thrown.
///     rank 0 one token at 3.0, rank 1 three at 1.0: (3 + 3) / 4 = 1.5 (mean of means: 2.0)
double mean_loss(std::span<const LossSums> ranks);

}  // namespace gyre
