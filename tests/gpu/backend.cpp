// What --backend, --comm and --share-gpus come to.

#include "harness/backend.hpp"

#include "app_context.hpp"
#include "errors.hpp"
#include "gpu_test.hpp"
#include "runtime/cuda_memory.hpp"

namespace gyre {
namespace GYRE_FILE {

class BackendOf : public test::GpuTest {
 protected:
  /// A backend by these options, share_gpus always.
  static std::unique_ptr<Backend> make(const std::string& backend, const std::string& comm) {
    return std::make_unique<Backend>(context(), BackendOptions{backend, comm, backend == "cuda"});
  }
  static AppContext& context() {
    static test::TestContext made;
    return made.context;
  }
};

TEST_F(BackendOf, TheCpuIsTheHost) {
  const auto backend = make("cpu", "");
  EXPECT_FALSE(backend->on_gpu());
  EXPECT_EQ(backend->space(), MemorySpace::host);
  EXPECT_EQ(backend->world().space(), MemorySpace::host);
  EXPECT_EQ(backend->world().backend(), "mpi");
  EXPECT_EQ(backend->world().size(), test::world().size());
  EXPECT_EQ(&backend->host_staging(), &backend->world());
  RunReport report = begin_report(context(), {}, {});
  backend->describe(report);
  EXPECT_EQ(report.ranks[0].device, "cpu");
  EXPECT_TRUE(report.unofficial_reasons.empty());
  EXPECT_EQ(header_text(report).find("# devices"), std::string::npos);
}

TEST_F(BackendOf, StagedIsOnTheDevice) {
  const auto backend = make("cuda", "staged");
  EXPECT_TRUE(backend->on_gpu());
  EXPECT_EQ(backend->space(), MemorySpace::device);
  EXPECT_EQ(backend->world().space(), MemorySpace::device);
  EXPECT_EQ(backend->world().backend(), "staged");
  EXPECT_EQ(backend->host_staging().space(), MemorySpace::host);
  EXPECT_EQ(backend->world().size(), test::world().size());
}

#ifdef GYRE_WITH_NCCL
TEST_F(BackendOf, NcclIsOnTheDevice) {
  const auto backend = std::make_unique<Backend>(context(), BackendOptions{"cuda", "nccl", false});
  EXPECT_EQ(backend->world().space(), MemorySpace::device);
  EXPECT_EQ(backend->world().backend(), "nccl");
  EXPECT_EQ(backend->host_staging().backend(), "nccl");
}
#endif

TEST_F(BackendOf, MemoryThatIsTakenIsNotThereAnyMore) {
  const auto backend = make("cuda", "staged");
  const int64_t before = backend->memory_bytes();
  EXPECT_GT(before, 0);
  const Buffer<float> taken(int64_t{1} << 20, MemorySpace::device);
  EXPECT_LE(backend->memory_bytes(), before - (int64_t{4} << 20));
}

TEST_F(BackendOf, TheReportNamesTheDevice) {
  const auto backend = make("cuda", "staged");
  RunReport report = begin_report(context(), {}, {});
  backend->describe(report);
  EXPECT_EQ(report.ranks[0].device.substr(0, 2), "0 ");
  EXPECT_EQ(report.ranks[0].device_uuid.substr(0, 4), "GPU-");
  const std::string header = header_text(report);
  EXPECT_NE(header.find("# devices (rank:device) " + report.ranks[0].host + ": 0:0 "),
            std::string::npos)
      << header;
#ifdef GYRE_SOFTGPU
  EXPECT_NE(header.find("| cuda software GPU (seed "), std::string::npos) << header;
  EXPECT_EQ(report.unofficial_reasons, std::vector<std::string>{"software GPU"});
#endif
}

TEST_F(BackendOf, WhatDoesNotGoTogetherIsAUsageError) {
  const auto message = [](const std::string& backend, const std::string& comm, bool share) {
    return test::usage_message([&] {
      Backend made(context(), BackendOptions{backend, comm, share});
    });
  };
  const std::string head = "these options do not go together:\n  - ";
  EXPECT_EQ(
      message("cpu", "nccl", false),
      head + "--comm nccl moves GPU memory; with --backend cpu it is mpi, or: --backend cuda");
  EXPECT_EQ(
      message("cpu", "staged", false),
      head + "--comm staged moves GPU memory; with --backend cpu it is mpi, or: --backend cuda");
  EXPECT_EQ(
      message("cuda", "mpi", false),
      head + "--comm mpi moves host memory; with --backend cuda it is nccl, staged or mpi-gpu");
  EXPECT_EQ(message("cpu", "", true), head + "--share-gpus goes with --backend cuda");
}

}  // namespace GYRE_FILE
}  // namespace gyre
