// Which set-ups are accepted, which masks sharded attention takes, and the mean loss over ranks.

#include "packing/compatibility.hpp"

#include <gtest/gtest.h>

#include <cmath>
#include <functional>

#include "errors.hpp"

namespace gyre {
namespace GYRE_FILE {

using test::expect_usage;
using Level = Compatibility::Level;

constexpr AttentionCapabilities nothing = {false, false, false};
constexpr AttentionCapabilities everything = {true, true, true};
constexpr DeviceCapability hopper = {9, 0}, affected = {12, 0};

ParallelSetup setup(bool packed, int cp, AttentionCapabilities attention,
                    std::optional<std::string> fused_flag = std::nullopt,
                    std::optional<DeviceCapability> device = std::nullopt) {
  ParallelSetup s;
  s.packed = packed;
  s.cp = cp;
  s.attention = attention;
  s.fused_flag = std::move(fused_flag);
  s.device = device;
  return s;
}

struct Row {
  std::string name;
  ParallelSetup setup;
  Level level;
  int rule;
  std::string message;
};
std::ostream& operator<<(std::ostream& out, const Row& row) {
  return out << row.name;
}
class Table : public testing::TestWithParam<Row> {};

TEST_P(Table, FirstRowThatAppliesCounts) {
  const Row& row = GetParam();
  const Compatibility result = check_compatibility(row.setup);
  EXPECT_EQ(result.level, row.level);
  EXPECT_EQ(result.rule, row.rule);
  EXPECT_EQ(result.message, row.message);
  if (row.level == Level::error)
    expect_usage(row.message, [&] { require_compatible(row.setup); });
  else
    EXPECT_EQ(require_compatible(row.setup).level, row.level);
}

const std::string unpacked_cp2 =
    "unpacked rows with cp 2: the padding mask cannot be honoured and gradients become NaN; pack "
    "the rows or use cp 1";
const std::string known_wrong =
    "packed rows: the fused attention gradient of this device (12.0) is known to be wrong; turn "
    "fused attention off";
const std::string unverified =
    "packed rows: the fused attention gradient of this device was not compared with a reference";

std::string lacks(int cp, const std::string& what) {
  return "packed rows with cp " + std::to_string(cp) + ": this attention does not support " + what +
         "; choose one that does, or unpacked rows with cp 1";
}
const std::string varlen = "segments of different lengths (varlen)";

ParallelSetup probed(GradientProbe probe, DeviceCapability device, bool forward_only = false) {
  ParallelSetup s = setup(true, 2, everything, std::nullopt, device);
  s.probe = probe;
  s.forward_only = forward_only;
  return s;
}
ParallelSetup without_padding(ParallelSetup s) {
  s.padding = false;
  return s;
}
ParallelSetup forward(ParallelSetup s) {
  s.forward_only = true;
  return s;
}
ParallelSetup hybrid(bool packed, int cp) {
  ParallelSetup s = setup(packed, cp, everything, "0");
  s.linear_attention = true;
  return s;
}

// clang-format off
const Row rows[] = {
    {"UnpackedOnOneRank", setup(false, 1, nothing), Level::ok, 0, ""},
    {"UnpackedOnOneRankAnyDevice", setup(false, 1, everything, "1", affected), Level::ok, 0, ""},
    {"UnpackedOnTwoRanks", setup(false, 2, everything), Level::error, 1, unpacked_cp2},
    {"UnpackedOnTwoRanksUnfused", setup(false, 2, nothing, "0", hopper), Level::error, 1,
     unpacked_cp2},
    {"UnpackedOnTwoRanksForwardOnly", forward(setup(false, 2, everything)), Level::error, 1,
     unpacked_cp2},
    {"PackedWithoutVarlen", setup(true, 1, nothing), Level::error, 2, lacks(1, varlen)},
    {"PackedWithoutVarlenUnfused", setup(true, 4, nothing, "0"), Level::error, 2,
     lacks(4, varlen)},
    {"PackedWithoutVarlenForwardOnly", forward(setup(true, 1, nothing)), Level::error, 2,
     lacks(1, varlen)},
    {"PackedWithoutVarlenOnAffectedDevice", setup(true, 2, nothing, "1", affected), Level::error,
     2, lacks(2, varlen)},
    {"PackedWithoutPaddedOffsets", setup(true, 1, {true, false, true}), Level::error, 2,
     lacks(1, "padding between segments (padded offsets)")},
    {"NoPaddedOffsetsForStreamsWithoutPadding",
     without_padding(setup(true, 1, {true, false, true}, "0")), Level::ok, 0, ""},
    {"VarlenForStreamsWithoutPadding", without_padding(setup(true, 1, {false, true, true}, "0")),
     Level::error, 2, lacks(1, varlen)},
    {"PackedWithoutCp", setup(true, 2, {true, true, false}), Level::error, 2,
     lacks(2, "context parallelism")},
    {"PackedWithoutCpOnOneRank", setup(true, 1, {true, true, false}, "0"), Level::ok, 0, ""},
    {"Unfused", setup(true, 2, everything, "0"), Level::ok, 0, ""},
    {"UnfusedOnAffectedDevice", setup(true, 1, everything, "0", affected), Level::ok, 0, ""},
    {"AffectedDevice", setup(true, 2, everything, std::nullopt, affected), Level::error, 3,
     known_wrong},
    {"AffectedDeviceOnOneRank", setup(true, 1, everything, std::nullopt, affected), Level::error,
     3, known_wrong},
    {"AffectedDeviceEmptyFlag", setup(true, 2, everything, "", affected), Level::error, 3,
     known_wrong},
    {"AffectedDeviceFlagOne", setup(true, 2, everything, "1", affected), Level::error, 3,
     known_wrong},
    {"AffectedDeviceFlagTrue", setup(true, 2, everything, "true", affected), Level::error, 3,
     known_wrong},
    {"AffectedDeviceFlagDoubleZero", setup(true, 2, everything, "00", affected), Level::error, 3,
     known_wrong},
    {"AffectedDeviceForwardOnly",
     forward(setup(true, 2, everything, std::nullopt, affected)), Level::warning, 0,
     "packed rows: the fused attention gradient of this device (12.0) is known to be wrong"},
    {"OtherDevice", setup(true, 2, everything, std::nullopt, hopper), Level::warning, 0,
     unverified},
    {"OtherMinor", setup(true, 2, everything, "1", DeviceCapability{12, 1}), Level::warning, 0,
     unverified},
    {"UnknownDevice", setup(true, 1, everything, ""), Level::warning, 0, unverified},
    {"UnknownDeviceForwardOnly", forward(setup(true, 1, everything, "true")), Level::warning, 0,
     unverified},
    {"ProbeDiffers", probed(GradientProbe::differs, hopper), Level::error, 3,
     "packed rows: the fused attention gradient of this device differs from the reference; turn "
     "fused attention off"},
    {"ProbeDiffersForwardOnly", probed(GradientProbe::differs, hopper, true), Level::warning, 0,
     "packed rows: the fused attention gradient of this device differs from the reference"},
    {"ProbeAgrees", probed(GradientProbe::agrees, hopper), Level::ok, 0, ""},
    {"ProbeAgreesOnAffectedDevice", probed(GradientProbe::agrees, affected), Level::ok, 0, ""},
    {"HybridPacked", hybrid(true, 1), Level::error, 4,
     "linear-attention layers carry a state over the whole row: packing is not possible; use "
     "unpacked rows with cp 1"},
    {"HybridOnTwoRanks", hybrid(false, 2), Level::error, 4,
     "linear-attention layers carry a state over the whole row: cp 2 is not possible; use unpacked "
     "rows with cp 1"},
    {"HybridPlain", hybrid(false, 1), Level::ok, 0, ""},
};
// clang-format on
INSTANTIATE_TEST_SUITE_P(Compatibility, Table, testing::ValuesIn(rows),
                         [](const auto& row) { return row.param.name; });

TEST(Compatibility, RejectsCpBelowOne) {
  expect_usage("cp must be at least 1, not 0",
               [] { check_compatibility(setup(true, 0, everything)); });
}

TEST(MaskContract, ShardedAttentionIsCausal) {
  check_mask_contract(true, AttentionMask::causal);
  check_mask_contract(true, AttentionMask::causal_segments, 5);
  expect_usage(
      "a dense attention mask under context parallelism; causal and causal with segments are "
      "possible, other attention must run unsharded",
      [] { check_mask_contract(true, AttentionMask::dense); });
  expect_usage(
      "a full attention mask under context parallelism; causal and causal with segments are "
      "possible, other attention must run unsharded",
      [] { check_mask_contract(true, AttentionMask::full); });
  expect_usage(
      "a causal mask without segment boundaries over 2 segments: they would see each other; use "
      "causal with segments",
      [] { check_mask_contract(true, AttentionMask::causal, 2); });
}

TEST(MaskContract, UnshardedAttentionTakesAnyMask) {
  for (const AttentionMask mask : {AttentionMask::causal, AttentionMask::causal_segments,
                                   AttentionMask::full, AttentionMask::dense})
    EXPECT_NO_THROW(check_mask_contract(false, mask, 3));
}

TEST(MeanLoss, WeighsTokensNotRanks) {
  EXPECT_DOUBLE_EQ(mean_loss(std::vector<LossSums>{{3.0, 1}, {3.0, 3}}), 1.5);
}

TEST(MeanLoss, ARankMayHaveNoSupervisedToken) {
  EXPECT_DOUBLE_EQ(mean_loss(std::vector<LossSums>{{0, 0}, {5.0, 2}, {0, 0}}), 2.5);
  expect_usage("no token of 2 ranks is supervised: every label is -100", [] {
    mean_loss(std::vector<LossSums>{{0, 0}, {0, 0}});
  });
  expect_usage("no token of 0 ranks is supervised: every label is -100", [] { mean_loss({}); });
}

TEST(SumLosses, SelectsSupervisedTokens) {
  const std::vector<float> losses = {3, NAN, 1, INFINITY, 0.5F};
  const std::vector<int64_t> labels = {7, -100, 0, -100, -1};
  const LossSums sums = sum_losses(losses, labels);
  EXPECT_DOUBLE_EQ(sums.loss, 4.5);
  EXPECT_EQ(sums.tokens, 3);
  const LossSums none = sum_losses({}, {});
  EXPECT_EQ(none.tokens, 0);
  expect_usage("5 losses and 2 labels; they must be equally many",
               [&] { sum_losses(losses, std::vector<int64_t>(2)); });
}

}  // namespace GYRE_FILE
}  // namespace gyre
