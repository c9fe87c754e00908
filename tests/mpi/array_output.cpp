// Files of a run's arrays: a dataset that is not written is noticed, and their sizes are known
// before.

#include "apps/common/array_output.hpp"

#include <gtest/gtest.h>

#include "apps/pack/inputs.hpp"
#include "apps/shard/batch.hpp"
#include "io_files.hpp"
#include "mpi_test.hpp"

namespace gyre {
namespace GYRE_FILE {

using test::world;

TEST(ArrayOutput, ADatasetThatIsNotWrittenFails) {
  const test::SharedFolder folder;
  ArrayFile made{row_shards_schema, "/row_shards", {{"cp", 2}}};
  made.arrays = {{"labels", {1}, std::vector<int64_t>{5}},
                 {"index", {2}, std::vector<int32_t>{0, 1}}};
  ArrayFile written = made;
  written.arrays.pop_back();
  OutputFile output(world(), folder.file("written.h5"));
  fill_arrays(output, written);
  for (const bool all : {false, true}) {
    Verification checks(1);
    const int64_t found =
        compare_arrays("file", output.temporary_path(), made, all, world(), checks);
    EXPECT_EQ(found, world().rank() == 0 ? 1 : 0);
    EXPECT_EQ(checks.passed(), !all);
  }
}

TEST(ArrayOutput, BytesAreThoseOfTheArrays) {
  // Rows of 5 slots get 8: for each rank's shard 4 B of index, and for each row 4 of mask, 8 of a
  // label, 8 of an id and 8 of a position.
  BshdArrays rows;
  BatchJob job;
  rows.rows = job.cp = 2;
  rows.slots = 5;
  EXPECT_EQ(row_shard_bytes(rows, job), 8 * (4 + 2 * 28));
  rows.hidden = 3;  // in the place of the id
  rows.position_axes = 2;
  EXPECT_EQ(row_shard_bytes(rows, job), 8 * (4 + 2 * (4 + 8 + 12 + 16)));
  // 5 and 2 samples are 2 frames and 1: encodings and three gradients, and the gradients of 4
  // ranks.
  SalmArrays audio;
  audio.hidden = 3;
  audio.window = 2;
  audio.audio_offsets = {0, 5, 7};
  EXPECT_EQ(encoder_bytes(audio, 4), 3 * 3 * 8 * 4);
}

}  // namespace GYRE_FILE
}  // namespace gyre
