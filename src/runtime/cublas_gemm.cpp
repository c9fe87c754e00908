#include <cublasLt.h>

#include <algorithm>
#include <map>
#include <memory>
#include <mutex>
#include <tuple>

#include "core/error.hpp"
#include "runtime/buffer.hpp"
#include "runtime/cuda_check.hpp"
#include "runtime/cuda_gemm.hpp"
#include "runtime/cuda_stream.hpp"
#include "runtime/gemm_layout.hpp"

namespace gyre {
namespace {

void check(cublasStatus_t status, const char* call, const ColumnMajorGemm& g) {
  if (status == CUBLAS_STATUS_SUCCESS) return;
  throw_runtime(
      "{} failed for c [{}, {}] {} = op(a) [{}, {}] {} times op(b), strides {}, {} and {}: {} ({})",
      call, g.n, g.m, name_of(g.result.type), g.n, g.k, name_of(g.second.type), g.result.leading,
      g.second.leading, g.first.leading, cublasLtGetStatusString(status),
      cublasLtGetStatusName(status));
}

template <class Handle, cublasStatus_t (*destroy)(Handle)>
struct Destroy {
  using pointer = Handle;
  void operator()(Handle handle) const { (void)destroy(handle); }
};
template <class Handle, cublasStatus_t (*destroy)(Handle)>
using Owned = std::unique_ptr<Handle, Destroy<Handle, destroy>>;
using Description = Owned<cublasLtMatmulDesc_t, cublasLtMatmulDescDestroy>;
using MatrixLayout = Owned<cublasLtMatrixLayout_t, cublasLtMatrixLayoutDestroy>;
using Preference = Owned<cublasLtMatmulPreference_t, cublasLtMatmulPreferenceDestroy>;

/// All inputs to the choice of an algorithm.
using Key = std::tuple<int64_t, int64_t, int64_t, DType, DType, int64_t, int64_t, int64_t,
                       Transpose, Transpose, bool, int, int, int>;

Key key_of(const ColumnMajorGemm& g, bool accumulate) {
  return {g.m,
          g.n,
          g.k,
          g.first.type,
          g.result.type,
          g.first.leading,
          g.second.leading,
          g.result.leading,
          g.first.op,
          g.second.op,
          accumulate,
          alignment_of(g.first.data),
          alignment_of(g.second.data),
          alignment_of(g.result.data)};
}

cudaDataType cuda_type(DType type) {
  return type == DType::f32 ? CUDA_R_32F : CUDA_R_16BF;
}

/// A product described to cuBLASLt, with the algorithm chosen by its heuristic, if any.
class Product {
 public:
  Product(cublasLtHandle_t handle, const ColumnMajorGemm& g, size_t workspace_bytes)
      : description_(describe(g)),
        first_(lay_out(g.first, g)),
        second_(lay_out(g.second, g)),
        result_(lay_out(g.result, g)) {
    choose(handle, g, workspace_bytes);
  }

  /// Whether the library has an algorithm; required by run().
  bool possible() const { return possible_; }

  void run(cublasLtHandle_t handle, const ColumnMajorGemm& g, std::byte* result, bool accumulate,
           Buffer<std::byte>& workspace, cudaStream_t stream) const {
    const float one = 1, beta = accumulate ? 1 : 0;
    check(cublasLtMatmul(handle, description_.get(), &one, g.first.data, first_.get(),
                         g.second.data, second_.get(), &beta, result, result_.get(), result,
                         result_.get(), &algorithm_, workspace.data(),
                         static_cast<size_t>(workspace.size()), stream),
          "cublasLtMatmul", g);
  }

 private:
  static Description describe(const ColumnMajorGemm& g) {
    cublasLtMatmulDesc_t made = nullptr;
    check(cublasLtMatmulDescCreate(&made, CUBLAS_COMPUTE_32F, CUDA_R_32F),
          "cublasLtMatmulDescCreate", g);
    Description description(made);
    const auto set = [&](cublasLtMatmulDescAttributes_t attribute, Transpose op) {
      const cublasOperation_t value = op == Transpose::yes ? CUBLAS_OP_T : CUBLAS_OP_N;
      check(cublasLtMatmulDescSetAttribute(made, attribute, &value, sizeof(value)),
            "cublasLtMatmulDescSetAttribute", g);
    };
    set(CUBLASLT_MATMUL_DESC_TRANSA, g.first.op);
    set(CUBLASLT_MATMUL_DESC_TRANSB, g.second.op);
    return description;
  }

  static MatrixLayout lay_out(const ColumnMajorGemm::Matrix& x, const ColumnMajorGemm& g) {
    cublasLtMatrixLayout_t made = nullptr;
    check(cublasLtMatrixLayoutCreate(&made, cuda_type(x.type), static_cast<uint64_t>(x.rows),
                                     static_cast<uint64_t>(x.cols), x.leading),
          "cublasLtMatrixLayoutCreate", g);
    return MatrixLayout(made);
  }

  void choose(cublasLtHandle_t handle, const ColumnMajorGemm& g, size_t workspace_bytes) {
    cublasLtMatmulPreference_t made = nullptr;
    check(cublasLtMatmulPreferenceCreate(&made), "cublasLtMatmulPreferenceCreate", g);
    const Preference preference(made);
    const auto set = [&](cublasLtMatmulPreferenceAttributes_t attribute, auto value) {
      check(cublasLtMatmulPreferenceSetAttribute(made, attribute, &value, sizeof(value)),
            "cublasLtMatmulPreferenceSetAttribute", g);
    };
    const auto alignment = [](const std::byte* data) {
      return static_cast<uint32_t>(alignment_of(data));
    };
    set(CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, uint64_t{workspace_bytes});
    set(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, alignment(g.first.data));
    set(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, alignment(g.second.data));
    set(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, alignment(g.result.data));
    set(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, alignment(g.result.data));
    // With split k, partial products are summed in f32 in the workspace. Summed in the result, they
    // would first be rounded to its type.
    set(CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK,
        uint32_t{CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE});
    cublasLtMatmulHeuristicResult_t found = {};
    int count = 0;
    cublasStatus_t status =
        cublasLtMatmulAlgoGetHeuristic(handle, description_.get(), first_.get(), second_.get(),
                                       result_.get(), result_.get(), made, 1, &found, &count);
    if (status == CUBLAS_STATUS_SUCCESS)
      status = count > 0 ? found.state : CUBLAS_STATUS_NOT_SUPPORTED;
    possible_ = status != CUBLAS_STATUS_NOT_SUPPORTED;
    if (possible_) check(status, "cublasLtMatmulAlgoGetHeuristic", g);
    algorithm_ = found.algo;
  }

  Description description_;
  MatrixLayout first_, second_, result_;
  cublasLtMatmulAlgo_t algorithm_ = {};
  bool possible_ = false;
};

/// cuBLASLt on one device. Never destroyed: at process exit CUDA may be unloaded first.
class Library {
 public:
  static Library& of_current_device() {
    static std::mutex mutex;
    static auto& libraries = *new std::map<int, std::unique_ptr<Library>>;
    int device = 0;
    GYRE_CHECK_CUDA(cudaGetDevice(&device));
    const std::lock_guard lock(mutex);
    std::unique_ptr<Library>& library = libraries[device];
    if (!library) library.reset(new Library);
    return *library;
  }

  /// Returns false without effect if the library has no algorithm for this product.
  bool multiply(const ColumnMajorGemm& g, std::byte* result, bool accumulate, cudaStream_t stream) {
    const std::lock_guard lock(mutex_);
    // Most runs repeat a few shapes. If shapes keep changing, as with bin lengths, the full cache
    // is cleared.
    constexpr size_t max_products = 4096;
    if (products_.size() >= max_products) products_.clear();
    const Key key = key_of(g, accumulate);
    auto found = products_.find(key);
    if (found == products_.end())
      found = products_.emplace(key, Product(handle_, g, workspace_bytes)).first;
    if (!found->second.possible()) return false;
    found->second.run(handle_, g, result, accumulate, workspace_, stream);
    return true;
  }

 private:
  static constexpr int64_t workspace_bytes = int64_t{32} << 20;

  Library() { check(cublasLtCreate(&handle_), "cublasLtCreate", {}); }

  std::mutex mutex_;
  cublasLtHandle_t handle_ = nullptr;
  Buffer<std::byte> workspace_{workspace_bytes, MemorySpace::device};
  std::map<Key, Product> products_;
};

}  // namespace

void cuda_gemm(ConstMatrixRef a, Transpose a_op, ConstMatrixRef b, Transpose b_op, MatrixRef c,
               bool accumulate, Stream& stream) {
  const ColumnMajorGemm g = column_major(a, a_op, b, b_op, c);
  if (g.m == 0 || g.n == 0) return;
  // k = 0: only c may have to be cleared. Version 0: the stub that replaces a missing library.
  const bool done =
      g.k > 0 && cublasLtGetVersion() > 0 &&
      Library::of_current_device().multiply(g, c.data, accumulate, cuda_handle(stream));
  if (!done) cuda_gemm_plain(a, a_op, b, b_op, c, accumulate, stream);
}

}  // namespace gyre
