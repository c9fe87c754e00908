#include "attention/kernels/cudnn_kernel.hpp"

#include <dlfcn.h>

#include <algorithm>
#include <cstdlib>
#include <map>
#include <unordered_map>
#include <utility>

#include "attention/kernels/attention_graphs.hpp"
#include "attention/kernels/cuda_finite_rows.hpp"
#include "attention/kernels/cuda_ragged_kernel.hpp"
#include "attention/kernels/cudnn_graphs.hpp"
#include "core/error.hpp"
#include "runtime/cuda_stream.hpp"

namespace cudnn_frontend {
void* cudnn_dlhandle = nullptr;  // handle in which the front end looks up its functions
}

namespace gyre {
namespace {

namespace fe = cudnn_frontend;

/// Loads the library once. Returns why it cannot be loaded, or an empty string.
const std::string& load_error() {
  static const std::string error = []() -> std::string {
    const std::string name = "libcudnn.so." + std::to_string(CUDNN_MAJOR);
    // Otherwise the front end would search for a CUDA runtime instead of using the linked one.
    setenv("CUDNN_FRONTEND_CUDART_LIB_NAME",
           ("libcudart.so." + std::to_string(CUDART_VERSION / 1000)).c_str(), 0);
    // From 9.25 on, cuDNN replaces deterministic engines above this by one with little workspace.
    setenv("CUDNN_FRONTEND_ATTN_DP_WORKSPACE_LIMIT", std::to_string(max_ordered_workspace).c_str(),
           0);
    fe::cudnn_dlhandle = dlopen(name.c_str(), RTLD_NOW | RTLD_LOCAL);
    if (fe::cudnn_dlhandle != nullptr) return "";
    const char* text = dlerror();
    return fmt::format("cuDNN cannot be loaded: {}", text != nullptr ? text : name);
  }();
  return error;
}

void check(cudnnStatus_t status, const char* call) {
  if (status != CUDNN_STATUS_SUCCESS)
    throw_runtime("{} failed: {} (status {})", call, fe::detail::get_error_string(status),
                  static_cast<int>(status));
}
void check(fe::error_t result, const char* call) {
  if (result.is_bad()) throw_runtime("cuDNN: {} failed: {}", call, result.get_message());
}

class BuiltGraph final : public AttentionGraph {
 public:
  BuiltGraph(cudnnHandle_t handle, std::shared_ptr<CudnnGraph> graph)
      : handle_(handle), graph_(std::move(graph)) {
    check(graph_->get_workspace_size(workspace_bytes_), "get_workspace_size");
  }
  int64_t workspace_bytes() const override { return workspace_bytes_; }
  void execute(const AttentionAddresses& addresses, std::byte* workspace) override {
    std::unordered_map<int64_t, void*> by_number;
    for (const auto& [id, address] : addresses) by_number[static_cast<int64_t>(id)] = address;
    check(graph_->execute(handle_, by_number, workspace), "execute");
  }

 private:
  cudnnHandle_t handle_;
  std::shared_ptr<CudnnGraph> graph_;
  int64_t workspace_bytes_ = 0;
};

class CudnnLibrary final : public AttentionLibrary {
 public:
  explicit CudnnLibrary(Stream& stream) : stream_(stream) {
    if (!load_error().empty()) throw_runtime("{}", load_error());
    check(fe::detail::create_handle(&handle_), "cudnnCreate");
    using SetStream = cudnnStatus_t (*)(cudnnHandle_t, cudaStream_t);
    const auto set_stream =
        reinterpret_cast<SetStream>(dlsym(fe::cudnn_dlhandle, "cudnnSetStream"));
    GYRE_CHECK(set_stream != nullptr, "cuDNN without cudnnSetStream");
    check(set_stream(handle_, cuda_handle(stream)), "cudnnSetStream");
  }
  ~CudnnLibrary() override { (void)fe::detail::destroy_handle(handle_); }
  CudnnLibrary(const CudnnLibrary&) = delete;
  CudnnLibrary& operator=(const CudnnLibrary&) = delete;

  std::string name() const override { return "cuDNN"; }
  /// Building a graph takes tenths of a second, which runs with fewer queries do not win back.
  int64_t least_even_queries() const override { return 512; }

  /// cuDNN does not document this, and its engines differ: each kind of graph is probed once.
  bool multiplies_masked_rows(const AttentionGraphShape& shape) override {
    AttentionGraphShape kind;
    kind.backward = shape.backward;
    kind.mask = shape.mask;
    kind.window = std::min<int64_t>(shape.window, 1);  // whether there is a window
    kind.head_dim = shape.head_dim;
    kind.value_dim = shape.value_dim;
    if (const auto found = masked_products_.find(kind); found != masked_products_.end())
      return found->second;
    AttentionGraphShape ordered = kind;
    ordered.deterministic = true;
    return masked_products_[kind] =
               find_masked_products(*this, kind, stream_) ||
               (kind.backward && find_masked_products(*this, ordered, stream_));
  }

  std::unique_ptr<AttentionGraph> build(const AttentionGraphShape& shape,
                                        std::string& problem) override {
    auto graph = make_attention_graph(shape, 0);
    if (auto result = graph->build(handle_, {fe::HeurMode_t::A, fe::HeurMode_t::FALLBACK});
        result.is_bad()) {
      problem = result.get_message();
      return nullptr;
    }
    return std::make_unique<BuiltGraph>(handle_, std::move(graph));
  }

 private:
  Stream& stream_;
  cudnnHandle_t handle_ = nullptr;
  std::map<AttentionGraphShape, bool> masked_products_;
};

}  // namespace

std::string cudnn_version(std::string* why) {
  if (!load_error().empty()) {
    if (why != nullptr) *why = load_error();
    return "";
  }
  const auto version = static_cast<int>(fe::detail::get_backend_version());
  return fmt::format("{}.{}.{}", version / 10000, version / 100 % 100, version % 100);
}

std::unique_ptr<BlockKernel> make_cudnn_kernel(Stream& stream, bool deterministic) {
  return make_ragged_kernel(stream, std::make_unique<CudnnLibrary>(stream), deterministic);
}

}  // namespace gyre
