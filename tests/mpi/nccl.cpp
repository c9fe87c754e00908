// NCCL where there is no GPU: a reason, and the right error on every rank. What NCCL does with one:
// tests/gpu/mpi_nccl.cu.

#include "comm/nccl.hpp"

#include <cstdlib>

#include "comm/agree.hpp"
#include "mpi_test.hpp"

#ifdef GYRE_WITH_NCCL
#include "runtime/cuda_stream.hpp"
#endif

namespace gyre {
namespace GYRE_FILE {

#ifndef GYRE_WITH_NCCL

TEST(NcclErrors, NeedsABuildWithNccl) {
  GTEST_SKIP() << "this build has no NCCL";
}

#else

TEST(NcclErrors, WithoutADeviceAllRanksThrowTheSame) {
#ifdef GYRE_SOFTGPU
  setenv("GYRE_SOFTGPU_DEVICES", "0", 1);
#endif
  if (usable_cuda_devices() > 0) GTEST_SKIP() << "this machine has a GPU";
  ExitCode code = ExitCode::ok;
  std::string text;
  bool agreed = false;
  try {
    make_nccl_communicator(test::world());
  } catch (const Error& error) {
    code = error.code();
    agreed = error.agreed();
    text = error.what();
  }
  EXPECT_EQ(static_cast<int>(code), 3);
  EXPECT_TRUE(agreed);
  EXPECT_EQ(text.find("no usable CUDA device on host "), 0u) << text;
  EXPECT_EQ(text, broadcast_string(test::world(), text, 0));
}

#endif

}  // namespace GYRE_FILE
}  // namespace gyre
