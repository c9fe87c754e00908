#include <cudnn_frontend.h>
#include <dlfcn.h>

#include <unordered_map>

#include "attention/kernels/attention_graphs.hpp"
#include "attention/kernels/cudnn_kernel.hpp"
#include "bare_cudnn.hpp"
#include "core/error.hpp"
#include "runtime/buffer.hpp"
#include "runtime/cuda_stream.hpp"

namespace gyre::bench {
namespace {

namespace fe = cudnn_frontend;
using TensorPtr = std::shared_ptr<fe::graph::Tensor_attributes>;

void check(fe::error_t result, const char* step) {
  if (result.is_bad()) throw_runtime("cuDNN: {} failed: {}", step, result.get_message());
}

enum Id : int64_t { q = 1, k, v, out, lse, d_out, d_q, d_k, d_v };

class Bare final : public BareCudnn {
 public:
  Bare(Stream& stream, const HeadShape& heads, int64_t tokens, const BareArrays& a, bool ordered)
      : heads_(heads), tokens_(tokens) {
    std::string why;
    if (cudnn_version(&why).empty()) throw_runtime("{}", why);
    if (fe::detail::create_handle(&handle_) != CUDNN_STATUS_SUCCESS)
      throw_runtime("cudnnCreate failed");
    using SetStream = cudnnStatus_t (*)(cudnnHandle_t, cudaStream_t);
    reinterpret_cast<SetStream>(dlsym(fe::cudnn_dlhandle, "cudnnSetStream"))(handle_,
                                                                             cuda_handle(stream));
    addresses_ = {{q, const_cast<void*>(a.q)},
                  {k, const_cast<void*>(a.k)},
                  {v, const_cast<void*>(a.v)},
                  {d_out, const_cast<void*>(a.d_out)},
                  {out, a.out},
                  {lse, a.lse},
                  {d_q, a.d_q},
                  {d_k, a.d_k},
                  {d_v, a.d_v}};
    forward_ = take(make(false, false));
    Graph plain = make(true, false), in_order = ordered ? make(true, true) : Graph{};
    ordered_ = ordered && in_order.problem.is_good() &&
               (plain.problem.is_bad() || is_moderate_order(in_order.workspace, plain.workspace));
    backward_ = take(std::move(ordered_ ? in_order : plain));
  }
  ~Bare() override { (void)fe::detail::destroy_handle(handle_); }
  Bare(const Bare&) = delete;
  Bare& operator=(const Bare&) = delete;

  bool ordered() const override { return ordered_; }
  void forward() override { run(*forward_, {q, k, v, out, lse}); }
  void backward() override { run(*backward_, {q, k, v, out, lse, d_out, d_q, d_k, d_v}); }

 private:
  void place(fe::graph::Tensor_attributes& tensor, Id id, int64_t heads) const {
    tensor.set_uid(id)
        .set_dim({1, heads, tokens_, heads_.head_dim})
        .set_stride(
            {tokens_ * heads * heads_.head_dim, heads_.head_dim, heads * heads_.head_dim, 1});
  }
  TensorPtr input(fe::graph::Graph& graph, Id id, int64_t heads) const {
    fe::graph::Tensor_attributes tensor;
    place(tensor, id, heads);
    return graph.tensor(tensor);
  }
  void place_lse(fe::graph::Tensor_attributes& tensor) const {
    tensor.set_uid(lse)
        .set_data_type(fe::DataType_t::FLOAT)
        .set_dim({1, heads_.heads, tokens_, 1})
        .set_stride({heads_.heads * tokens_, tokens_, 1, 1});
  }
  template <class Attributes>
  Attributes& causal(Attributes& options) const {
    return options.set_name("attention")
        .set_attn_scale(heads_.scale)
        .set_diagonal_alignment(fe::DiagonalAlignment_t::TOP_LEFT)
        .set_diagonal_band_right_bound(0);
  }

  struct Graph {
    std::shared_ptr<fe::graph::Graph> graph;
    fe::error_t problem;
    int64_t workspace = 0;
  };
  std::shared_ptr<fe::graph::Graph> take(Graph built) {
    check(built.problem, "build");
    if (workspace_.size() < built.workspace)
      workspace_ = Buffer<std::byte>(built.workspace, MemorySpace::device);
    return std::move(built.graph);
  }

  Graph make(bool backward, bool ordered) const {
    auto graph = std::make_shared<fe::graph::Graph>();
    graph->set_io_data_type(fe::DataType_t::BFLOAT16)
        .set_intermediate_data_type(fe::DataType_t::FLOAT)
        .set_compute_data_type(fe::DataType_t::FLOAT);
    const TensorPtr queries = input(*graph, q, heads_.heads);
    const TensorPtr keys = input(*graph, k, heads_.kv_heads),
                    values = input(*graph, v, heads_.kv_heads);
    if (backward) {
      const TensorPtr o = input(*graph, out, heads_.heads),
                      d_o = input(*graph, d_out, heads_.heads);
      fe::graph::Tensor_attributes stats;
      place_lse(stats);
      fe::graph::SDPA_backward_attributes options;
      options.set_deterministic_algorithm(ordered);
      const auto [dq, dk, dv] = graph->sdpa_backward(queries, keys, values, o, d_o,
                                                     graph->tensor(stats), causal(options));
      place(*dq, d_q, heads_.heads);
      place(*dk, d_k, heads_.kv_heads);
      place(*dv, d_v, heads_.kv_heads);
      for (const TensorPtr& gradient : {dq, dk, dv}) gradient->set_output(true);
    } else {
      fe::graph::SDPA_attributes options;
      const auto [o, stats] =
          graph->sdpa(queries, keys, values, causal(options).set_generate_stats(true));
      place(*o, out, heads_.heads);
      o->set_output(true);
      place_lse(*stats);
      stats->set_output(true);
    }
    Graph built{graph, graph->build(handle_, {fe::HeurMode_t::A, fe::HeurMode_t::FALLBACK}), 0};
    if (built.problem.is_good())
      check(graph->get_workspace_size(built.workspace), "get_workspace_size");
    return built;
  }

  void run(const fe::graph::Graph& graph, std::initializer_list<Id> ids) {
    std::unordered_map<int64_t, void*> pack;
    for (const Id id : ids) pack[id] = addresses_.at(id);
    check(graph.execute(handle_, pack, workspace_.data()), "execute");
  }

  HeadShape heads_;
  int64_t tokens_;
  cudnnHandle_t handle_ = nullptr;
  Buffer<std::byte> workspace_;
  std::unordered_map<int64_t, void*> addresses_;
  std::shared_ptr<fe::graph::Graph> forward_, backward_;
  bool ordered_ = false;
};

}  // namespace

std::unique_ptr<BareCudnn> make_bare_cudnn(Stream& stream, const HeadShape& heads, int64_t tokens,
                                           const BareArrays& arrays, bool ordered) {
  return std::make_unique<Bare>(stream, heads, tokens, arrays, ordered);
}

}  // namespace gyre::bench
