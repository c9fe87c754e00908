#pragma once
// Which combinations of packing, context parallelism and attention are sound, before anything runs.
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
// The first row that applies counts. As NeMo's validate_parallelism_compatibility, with the name of
// a backend replaced by what it can do, and a list of devices by a probe of the gradient.

#include <cstdint>
#include <optional>
#include <span>
#include <string>

namespace gyre {

/// What an attention implementation can do.
struct AttentionCapabilities {
  bool varlen = false;          ///< segments of different lengths in one stream (cu_seqlens)
  bool padded_offsets = false;  ///< segments that lie at cu_seqlens_padded
  bool cp_aware = false;        ///< exchanges keys and values among context-parallel ranks
};

/// The capability of a CUDA device, e.g. (9, 0).
struct DeviceCapability {
  int major = 0;
  int minor = 0;
  friend bool operator==(const DeviceCapability&, const DeviceCapability&) = default;
};

/// The outcome of comparing the fused backward with a reference on the device at hand.
enum class GradientProbe { not_run, agrees, differs };

struct ParallelSetup {
  bool packed = false;
  int cp = 1;
  AttentionCapabilities attention;
  /// The value of the variable that turns fused attention off (NVTE_FUSED_ATTN); only "0" does.
  std::optional<std::string> fused_flag;
  /// Decides where no probe was run: the fused THD backward of (12, 0) is known to be wrong.
  std::optional<DeviceCapability> device;
  GradientProbe probe = GradientProbe::not_run;
  bool forward_only = false;      ///< rule 3 becomes a warning; all else stays
  bool linear_attention = false;  ///< a hybrid model: neither packing nor cp > 1 (rule 4, first)
};

struct Compatibility {
  enum class Level { ok, warning, error };
  Level level = Level::ok;
  int rule = 0;         ///< 1 to 4 with an error, else 0
  std::string message;  ///< empty if ok
};

/// Pure; see the table. Throws a usage error for cp < 1.
Compatibility check_compatibility(const ParallelSetup& setup);
/// Throws a usage error with the message if the level is error; returns the result otherwise.
Compatibility require_compatible(const ParallelSetup& setup);

/// Which keys a query may see, as a caller of attention asks for it.
enum class AttentionMask {
  causal,           ///< earlier positions of the stream
  causal_segments,  ///< earlier positions of the same segment
  full,             ///< all positions
  dense,            ///< an array [queries, keys]
};
/// Under context parallelism only masks that follow from positions and segment boundaries are
/// admissible: causal and causal_segments. Others end with a usage error rather than being replaced
/// by a causal mask; attention that needs them (an image tower) has to run unsharded. `segments` is
/// how many the stream has: plain causal attention over several would let them see each other.
/// Unsharded attention takes any mask.
void check_mask_contract(bool sharded, AttentionMask mask, int64_t segments = 1);

/// What one rank contributes to a mean loss. Sums over ranks are what is reduced; a mean of means
/// would weigh tokens by how few their rank has.
struct LossSums {
  double loss = 0;     ///< Σ over labels other than ignored_label
  int64_t tokens = 0;  ///< how many there are
  LossSums& operator+=(const LossSums& other) {
    loss += other.loss;
    tokens += other.tokens;
    return *this;
  }
};
/// Of losses and labels [slots]; losses of ignored slots are not read, so they may be NaN. Throws a
/// usage error when the lengths differ.
LossSums sum_losses(std::span<const float> losses, std::span<const int64_t> labels);

/// Σ loss / Σ tokens over all context- and data-parallel ranks. A rank may have none; if no rank
/// has any there is no mean, and a usage error says so.
///     rank 0 one token at 3.0, rank 1 three at 1.0: (3 + 3) / 4 = 1.5 (mean of means: 2.0)
double mean_loss(std::span<const LossSums> ranks);

}  // namespace gyre
