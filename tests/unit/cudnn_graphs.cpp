// cuDNN's graphs, as far as they go without a GPU: what the front end takes, and for what cuDNN has
// engines on the GPUs that Gyre is built for. The library is told the properties of a device, and
// the driver is the toolkit's stub, which is all that choosing an engine asks for.

#include <gtest/gtest.h>

#ifdef GYRE_WITH_CUDNN

#include <dlfcn.h>
#include <fmt/format.h>

#include "attention/kernels/cudnn_graphs.hpp"
#include "attention/kernels/cudnn_kernel.hpp"
#include "runtime/cuda_stream.hpp"

namespace gyre {
namespace GYRE_FILE {

namespace fe = cudnn_frontend;

constexpr RaggedMask masks[] = {RaggedMask::full, RaggedMask::causal, RaggedMask::causal_end};

AttentionGraphShape shape_of(bool backward, RaggedMask mask, int64_t head_dim,
                             int64_t longest_q = 8192, int64_t value_dim = 0) {
  AttentionGraphShape shape;
  shape.backward = backward;
  shape.mask = mask;
  shape.heads = 8;
  shape.kv_heads = 2;
  shape.head_dim = head_dim;
  shape.value_dim = value_dim > 0 ? value_dim : head_dim;
  shape.scale = 0.1F;
  shape.batch = 4;
  shape.longest_q = longest_q;
  shape.longest_k = 8192;
  shape.q_stride = shape.d_q_stride = 8 * head_dim;
  shape.d_out_stride = shape.out_stride = 8 * shape.value_dim;
  shape.k_stride = shape.v_stride = 2 * (head_dim + shape.value_dim);  // side by side
  shape.lse_stride = 8;
  return shape;
}

/// Entries of 5000 rows with 7 between them.
AttentionGraphShape even_shape_of(bool backward, RaggedMask mask, int64_t head_dim,
                                  int64_t value_dim = 0) {
  AttentionGraphShape shape = shape_of(backward, mask, head_dim, 5000, value_dim);
  shape.even = true;
  shape.longest_k = mask == RaggedMask::causal_end ? 6000 : 5000;
  shape.q_distance = shape.out_distance = 5007;
  shape.k_distance = shape.longest_k + 7;
  shape.d_q_distance = 5000;
  return shape;
}

class CudnnGraphs : public testing::Test {
 protected:
  void SetUp() override {
    std::string why;
    if (cudnn_version(&why).empty()) GTEST_SKIP() << why;
  }
};

TEST_F(CudnnGraphs, AreTakenByTheFrontEnd) {
  for (const RaggedMask mask : masks)
    for (const int64_t head_dim : {64, 96, 128})
      for (const int sm : {80, 90, 100}) {
        EXPECT_EQ(refusal(shape_of(false, mask, head_dim), sm), "") << head_dim << " on " << sm;
        if (sm < 90) continue;
        EXPECT_EQ(refusal(shape_of(true, mask, head_dim), sm), "") << head_dim << " on " << sm;
      }
}

TEST_F(CudnnGraphs, OfEvenBatchesAreTakenByTheFrontEnd) {
  for (const RaggedMask mask : masks)
    for (const int sm : {80, 90, 100})
      for (const bool backward : {false, true})
        EXPECT_EQ(refusal(even_shape_of(backward, mask, 128), sm), "")
            << name_of(mask) << " on " << sm;
}

TEST_F(CudnnGraphs, WithWindowsAreTakenByTheFrontEnd) {
  for (const RaggedMask mask : {RaggedMask::causal, RaggedMask::causal_end})
    for (const int sm : {90, 100})
      for (const bool backward : {false, true}) {
        AttentionGraphShape shape = shape_of(backward, mask, 128);
        shape.window = 100;
        EXPECT_EQ(refusal(shape, sm), "") << name_of(mask) << " on " << sm;
      }
}

TEST_F(CudnnGraphs, AreRefusedWithAReason) {
  const auto refused = [](const AttentionGraphShape& shape, int sm, const std::string& reason) {
    EXPECT_NE(refusal(shape, sm).find(reason), std::string::npos) << refusal(shape, sm);
  };
  refused(shape_of(false, RaggedMask::full, 100), 90, "multiple of 8");
  refused(shape_of(true, RaggedMask::full, 256), 100, "hidden_dim");
  refused(shape_of(true, RaggedMask::full, 128), 80, "ragged");
}

/// The properties of a device, as cuDNN writes them down.
std::shared_ptr<const fe::DeviceProperties> device_properties(int sm) {
  const bool newer = sm >= 90;
  const std::string text =
      fmt::format(R"({{"cudaDeviceId":0,"deviceVer":{},"driverVer":13000,"multiProcessorCount":{},)"
                  R"("maxGridSize":[2147483647,65535,65535],"maxBlockSize":[1024,1024,64],)"
                  R"("regsPerBlock":65536,"warpSize":32,"maxSharedMemoryPerBlock":49152,)"
                  R"("maxSharedMemoryPerBlockOptin":{},"reservedSharedMemoryPerBlock":1024,)"
                  R"("maxRegistersPerSM":65536,"maxCtasPerSM":32,"maxThreadsPerBlock":1024,)"
                  R"("maxThreadsPerSM":2048,"pciDeviceId":0,"isTccDriver":0,"supportCoopLaunch":1,)"
                  R"("smClockRateKHz":1410000,"memClockRateKHz":1593000,"l2CacheSize":41943040,)"
                  R"("deviceName":"GPU","totalGlobalMem":85899345920}})",
                  10 * sm, newer ? 132 : 108, newer ? 232448 : 166912);
  auto properties = std::make_shared<fe::DeviceProperties>();
  auto result = properties->deserialize({text.begin(), text.end()});
  EXPECT_TRUE(result.is_good()) << result.get_message();
  return properties;
}

/// That cuDNN has an engine for the graph of a shape on a device.
void expect_engine(const AttentionGraphShape& shape, int sm,
                   const std::shared_ptr<const fe::DeviceProperties>& properties) {
  const auto graph = make_attention_graph(shape, sm);
  graph->set_device_properties(properties);
  const auto expect_good = [&](fe::error_t result, const char* step) {
    EXPECT_TRUE(result.is_good()) << step << ": " << (shape.even ? "even " : "ragged ")
                                  << (shape.backward ? "backward " : "forward ")
                                  << name_of(shape.mask) << ", window " << shape.window
                                  << ", head_dim " << shape.head_dim << ", sm_" << sm << ": "
                                  << result.get_message();
  };
  expect_good(graph->validate(), "validate");
  expect_good(graph->build_operation_graph(), "build_operation_graph");
  expect_good(graph->create_execution_plans({fe::HeurMode_t::A}), "plans");
  expect_good(graph->check_support(), "check_support");
}

TEST_F(CudnnGraphs, HaveEngines) {
  if (usable_cuda_devices() > 0) GTEST_SKIP() << "there is a driver, for one device";
  if (dlopen(GYRE_CUDA_STUBS "/libcuda.so", RTLD_NOW | RTLD_GLOBAL) == nullptr)
    GTEST_SKIP() << dlerror();
  for (const int sm : {80, 90, 100}) {
    const auto properties = device_properties(sm);
    for (const bool backward : {false, true})
      for (const RaggedMask mask : masks)
        for (const int64_t head_dim : {64, 128})
          for (const auto& [longest_q, window] : {std::pair{128, 0}, {8192, 0}, {8192, 100}}) {
            if (backward && sm < 90) continue;  // refused by the front end
            if (window > 0 && mask == RaggedMask::full) continue;
            AttentionGraphShape shape = shape_of(backward, mask, head_dim, longest_q);
            shape.window = window;
            shape.deterministic = backward && longest_q > 128;
            // The executor's own, with deltas beside them.
            if (head_dim == 128) shape.lse_stride = 2 * shape.heads;
            expect_engine(shape, sm, properties);
          }
    for (const bool backward : {false, true})
      for (const RaggedMask mask : masks)
        for (const int64_t head_dim : {64, 128})
          expect_engine(even_shape_of(backward, mask, head_dim), sm, properties);
    // Multi-head latent attention. The front end refuses its gradients on 8.0.
    for (const bool backward : {false, sm >= 90})
      for (const RaggedMask mask : masks) {
        expect_engine(shape_of(backward, mask, 192, 8192, 128), sm, properties);
        expect_engine(even_shape_of(backward, mask, 192, 128), sm, properties);
      }
  }
}

TEST(Cudnn, DiagonalsBeginWhereTheMasksSay) {
  EXPECT_EQ(diagonal_of(RaggedMask::full), std::nullopt);
  EXPECT_EQ(diagonal_of(RaggedMask::causal), fe::DiagonalAlignment_t::TOP_LEFT);
  EXPECT_EQ(diagonal_of(RaggedMask::causal_end), fe::DiagonalAlignment_t::BOTTOM_RIGHT);
}

TEST_F(CudnnGraphs, OfTwoShapesAreTwo) {
  const AttentionGraphShape a = shape_of(true, RaggedMask::causal, 64);
  AttentionGraphShape b = a;
  EXPECT_EQ(a, b);
  b.even = true;
  EXPECT_LT(a, b);
}

TEST(Cudnn, VersionIsThatOfTheHeadersOrNewer) {
  std::string why;
  const std::string version = cudnn_version(&why);
  if (version.empty()) {
    EXPECT_NE(why.find("cuDNN cannot be loaded"), std::string::npos) << why;
  } else {
    EXPECT_EQ(version.substr(0, version.find('.')), std::to_string(CUDNN_MAJOR));
  }
}

}  // namespace GYRE_FILE
}  // namespace gyre

#else

TEST(CudnnGraphs, NeedCudnn) {
  GTEST_SKIP() << "this build has no cuDNN";
}

#endif
