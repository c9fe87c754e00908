// All ranks of a group must start from the same batch.

#include <gtest/gtest.h>

#include "io_files.hpp"
#include "packing/cp_batch.hpp"

namespace gyre {
namespace GYRE_FILE {

using test::world;

BshdBatch batch() {
  BshdBatch b;
  b.rows = 1;
  b.slots = 4;
  b.inputs = TokenIds{1, 2, 3, 0};
  b.labels = {2, 3, -100, -100};
  b.positions = PositionIds{1, {0, 1, 2, 3}};
  b.seq_lens = LengthTable{1, 1, {3}};
  b.seq_lens_padded = LengthTable{1, 1, {4}};
  b.extras["weight"] =
      make_extra(std::span<const int32_t>(std::vector<int32_t>{7}), Extra::Aligned::rows);
  return b;
}

TEST(BatchAgreement, EqualBatchesPass) {
  agree_on_batch(world(), batch());
}

TEST(BatchAgreement, DifferencesEndAllRanksWithOneMessage) {
  if (world().size() == 1) GTEST_SKIP() << "one rank agrees with itself";
  const bool last = world().rank() == world().size() - 1;
  const auto refused = [&](const std::string& what, const std::function<void(BshdBatch&)>& change) {
    BshdBatch b = batch();
    if (last) change(b);
    test::expect_error(ExitCode::usage, "sharding a batch: " + what,
                       [&] { agree_on_batch(world(), b); });
  };
  refused("the number of rows is 1 on rank 0, but 2 on rank", [](BshdBatch& b) { b.rows = 2; });
  refused("the digest of the inputs is", [](BshdBatch& b) { b.inputs = TokenIds{1, 2, 4, 0}; });
  refused("the digest of labels", [](BshdBatch& b) { b.labels[1] = 5; });
  refused("the digest of labels", [](BshdBatch& b) { b.positions->values[3] = 0; });
  refused("the digest of labels", [](BshdBatch& b) { b.seq_lens->cells[0] = 2; });
  refused("the digest of labels", [](BshdBatch& b) { b.seq_lens_padded.reset(); });
  refused("the digest of the extras", [](BshdBatch& b) {
    b.extras["weight"] =
        make_extra(std::span<const int32_t>(std::vector<int32_t>{8}), Extra::Aligned::rows);
  });
  refused("the digest of the extras", [](BshdBatch& b) {
    auto extra = b.extras.extract("weight");
    extra.key() = "height";
    b.extras.insert(std::move(extra));
  });
}

}  // namespace GYRE_FILE
}  // namespace gyre
