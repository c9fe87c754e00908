// The progress line.

#include "errors.hpp"
#include "report/progress.hpp"

namespace gyre {
namespace GYRE_FILE {

TEST(ProgressText, HasRateAndTimeLeft) {
  EXPECT_EQ(progress_text(12, 30, 41, "ring, fwd"),
            "12 of 30 rows, 41 s, 3.4 s a row, about 62 s left: ring, fwd");
  EXPECT_EQ(progress_text(0, 1, 6, ""), "0 of 1 row, 6 s");
  EXPECT_EQ(progress_text(1, 100, 200, ""),
            "1 of 100 rows, 3 min, 3 min a row, about 330 min left");
}

TEST(ProgressText, StaysInOneLineOfATerminal) {
  EXPECT_EQ(shortened_to(9, "12345678"), "12345678");
  EXPECT_EQ(shortened_to(8, "12345678"), "1234...");
  EXPECT_EQ(shortened_to(2, "12345678"), "...");
}

}  // namespace GYRE_FILE
}  // namespace gyre
