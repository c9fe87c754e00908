// The executor on the device: schedules under layouts, both directions, against the whole attention
// in double precision. Once with a kernel that computes on the host, so that a failure is the
// executor's, and once with the device's own.

#include <cuda_runtime_api.h>

#include <set>

#include "attention/kernels/cuda_kernel.hpp"
#include "attention/kernels/cuda_ragged_kernel.hpp"
#include "attention_run.hpp"
#include "comm/staged.hpp"
#include "device_reference_kernel.hpp"
#include "gpu_test.hpp"
#include "mask_cases.hpp"
#include "plain_attention.hpp"
#ifdef GYRE_WITH_NCCL
#include "comm/nccl.hpp"
#endif
#ifdef GYRE_SOFTGPU
#include <softgpu_progress.h>
#endif

namespace gyre {
namespace GYRE_FILE {

using test::Attention;
using test::bits_of;
using test::Configuration;
using test::expect_empty_padding;
using test::expect_results;
using test::make_problem;
using test::OnDevice;
using test::Problem;
using test::ProblemSpec;
using test::same_bits;
using test::world;

class DeviceAttention : public test::GpuTest {
 protected:
  void SetUp() override {
    GpuTest::SetUp();
    if (IsSkipped()) return;
#ifdef GYRE_WITH_NCCL
    use_nccl_memory();
#endif
    group_ = make_staged_communicator(world());
    kernel_ = make_cuda_kernel(stream());
    reference_ = std::make_unique<test::DeviceReferenceKernel>(stream());
    device_ = std::make_unique<OnDevice>(OnDevice{stream(), world()});
  }

  Communicator& group() {
    return *group_;
  }
  BlockKernel& kernel() {
    return *kernel_;
  }
  BlockKernel& reference() {
    return *reference_;
  }
  const OnDevice* device() {
    return device_.get();
  }

  /// Fills all arrays but the inputs, and all free copies of messages, with NaN.
  void poison(Attention& attention, const ElementTypes& types) {
    AttentionWorkspace& workspace = attention.workspace();
    const RankPlan& plan = attention.plan();
    std::set<int> inputs;
    for (const ArrayKind kind : {ArrayKind::q, ArrayKind::kv, ArrayKind::d_out})
      inputs.insert(plan.arrays[own(kind)].storage);
    const auto fill = [&](std::span<std::byte> bytes) {
      stream().fill(bytes.data(), std::byte{0xff}, bytes.size());
    };
    for (const PlanArray& a : plan.arrays)
      if (!inputs.contains(a.storage))
        fill(workspace.storage(a.storage, stored_bytes(a, attention.problem().heads, types)));
    std::vector<Buffer<float>> free;
    for (const int64_t bytes = workspace.bytes(); workspace.bytes() == bytes;)
      free.push_back(workspace.take_staging(1));
    for (Buffer<float>& buffer : free) {
      fill(std::as_writable_bytes(buffer.span()));
      workspace.give_back(std::move(buffer));
    }
  }

  /// Run twice by the quicker kernel: the second run finds what the first one has left as NaN.
  void expect_right(const Problem& p, const Configuration& c, Communicator& comm,
                    BlockKernel& block_kernel) {
    Attention attention(p, c, comm, block_kernel, &shared_, device());
    if (attention.refused()) return;
    for (int run = &block_kernel == kernel_.get() ? 1 : 0; run < 2; ++run) {
      poison(attention, c.types);
      attention.run();
    }
    expect_results(p, attention, attention.tolerances());
    expect_empty_padding(attention);
    ++configurations_;
  }

  /// `names`: of schedules; all if none are named.
  void expect_all_right(const ProblemSpec& spec, const std::vector<std::string>& layouts,
                        const ElementTypes& types, Communicator& comm, BlockKernel& block_kernel,
                        const std::set<std::string>& names = {}) {
    const Problem p = make_problem(spec);
    for (const Schedule& schedule : schedules())
      for (const std::string& layout : layouts) {
        if (!names.empty() && !names.contains(schedule.name)) continue;
        for (const ScheduleOptions& options : test::options_of(schedule)) {
          const Configuration c{schedule, find_layout(layout), types, options};
          SCOPED_TRACE(name_of(c, spec));
          expect_right(p, c, comm, block_kernel);
        }
      }
  }
  int configurations() const {
    return configurations_;
  }

 private:
  std::unique_ptr<Communicator> group_;
  std::unique_ptr<BlockKernel> kernel_, reference_;
  std::unique_ptr<OnDevice> device_;
  AttentionWorkspace shared_;  // by all configurations, one after the other
  int configurations_ = 0;
};

const std::vector<int64_t> ragged = {13, 0, 1, 2, 21};
const ElementTypes wide = {};
const ElementTypes mixed = {DType::bf16, DType::f32, DType::f32, DType::bf16};
const ElementTypes narrow = {DType::bf16, DType::bf16, DType::bf16, DType::bf16};

TEST_F(DeviceAttention, ExecutesEveryScheduleLayoutAndMask) {
  for (const MaskRule& mask : {MaskRule{MaskKind::causal}, MaskRule{MaskKind::full},
                               MaskRule{MaskKind::causal, 6}, test::mixed_mask(ragged)})
    expect_all_right({ragged, {4, 2, 8, 0}, mask},
                     {"contiguous", "dual-chunk-swap", "striped", "balanced"}, wide, group(),
                     reference());
  EXPECT_GT(configurations(), 3 * 8 * 3);
}

TEST_F(DeviceAttention, ExecutesSinksGroupsOfHeadsAndSharedKeys) {
  for (const HeadShape& heads :
       {HeadShape{6, 1, 8, 0}, HeadShape{4, 4, 8, 0}, HeadShape{4, 4, 8, 0, 6, 2}})
    expect_all_right({ragged, heads, {MaskKind::causal, 9}, true}, {"dual-chunk-swap"}, wide,
                     group(), reference());
}

TEST_F(DeviceAttention, ExecutesQueriesOfTheLastTokens) {
  expect_all_right({.lengths = ragged,
                    .heads = {4, 2, 8, 0},
                    .mask = {},
                    .sinks = true,
                    .queries = {5, 0, 1, 0, 7}},
                   {"dual-chunk-swap", "striped"}, wide, group(), reference());
}

TEST_F(DeviceAttention, ExecutesEveryElementType) {
  for (const ElementTypes& types : {mixed, narrow})
    expect_all_right({{29, 6}, {4, 2, 8, 0}, {MaskKind::causal}, true, DType::bf16},
                     {"dual-chunk-swap", "striped"}, types, group(), reference());
}

TEST_F(DeviceAttention, WithItsOwnKernel) {
  const HeadShape heads = {4, 2, 16, 0};
  const std::set<std::string> some = {"ring", "all-gather", "halo"};
  expect_all_right({{70, 0, 1, 19}, heads, {MaskKind::causal}, true, DType::bf16},
                   {"dual-chunk-swap"}, mixed, group(), kernel());
  for (const MaskRule& mask : {MaskRule{MaskKind::full}, MaskRule{MaskKind::causal, 20}})
    expect_all_right({{70, 0, 1, 19}, heads, mask}, {"dual-chunk-swap"}, wide, group(), kernel(),
                     some);
  expect_all_right({{70, 0, 1, 19}, heads, test::mixed_mask({70, 0, 1, 19})}, {"dual-chunk-swap"},
                   wide, group(), kernel(), {"ring", "group-cast"});
  expect_all_right({{40, 3}, {2, 1, 16, 0}, {MaskKind::causal}, false, DType::bf16}, {"striped"},
                   narrow, group(), kernel(), some);
}

TEST_F(DeviceAttention, WithAKernelThatWritesFreshResults) {
  // What no call is the first to write is cleared all the same: padding, rows that nothing sees,
  // what is received and added.
  test::DeviceReferenceKernel fresh(stream(), true);
  for (const MaskRule& mask : {MaskRule{MaskKind::causal}, MaskRule{MaskKind::causal, 6}})
    expect_all_right({ragged, {4, 2, 8, 0}, mask}, {"contiguous", "dual-chunk-swap", "striped"},
                     wide, group(), fresh);
  expect_all_right({ragged, {4, 2, 8, 0}, {MaskKind::causal}, true, DType::bf16},
                   {"dual-chunk-swap"}, narrow, group(), fresh);
  EXPECT_GT(fresh.overwriting_forward, 0);
  EXPECT_GT(fresh.overwrite_d_q, 0);
  EXPECT_GT(fresh.overwrite_d_kv, 0);
  EXPECT_GT(fresh.with_out, 0);
}

/// The ring's plan, with every call for one KV head at a time.
RankPlan head_by_head(const AttentionProblem& problem, int rank) {
  RankPlan plan = plan_rank(find_schedule("ring"), problem, rank);
  for (std::vector<Step>* steps : {&plan.forward, &plan.backward}) {
    std::vector<Step> parts;
    for (const Step& s : *steps) {
      const auto* compute = std::get_if<step::Compute>(&s);
      for (int64_t h = 0; h < (compute != nullptr ? problem.heads.kv_heads : 1); ++h) {
        parts.push_back(s);
        if (compute != nullptr) std::get<step::Compute>(parts.back()).kv_heads = {h, 1};
      }
    }
    *steps = std::move(parts);
  }
  return plan;
}

TEST_F(DeviceAttention, ACallForSomeHeadsIsNotFresh) {
  test::DeviceReferenceKernel fresh(stream(), true);
  const Problem p = make_problem({ragged, {4, 2, 8, 0}, {MaskKind::causal}});
  // What is computed at a time changes no message.
  const Schedule schedule = {"head by head", "", head_by_head, find_schedule("ring").closed_form};
  expect_right(p, {schedule, find_layout("dual-chunk-swap")}, group(), fresh);
  EXPECT_EQ(fresh.overwriting_forward + fresh.overwrite_d_q + fresh.overwrite_d_kv, 0);
}

TEST_F(DeviceAttention, WithALibrarysKernel) {
  // Longer than what its sizes are rounded up to; results where they belong and not.
  test::PlainAttention plain;
  const auto library = make_ragged_kernel(stream(), test::make_plain_attention(stream(), plain));
  const ProblemSpec long_one = {{300}, {4, 2, 16, 0}, {MaskKind::causal}, true, DType::bf16};
  expect_all_right(long_one, {"dual-chunk-swap"}, narrow, group(), *library,
                   {"ring", "all-gather", "all-to-all"});
  const ProblemSpec many = {{70, 0, 1, 19}, {4, 2, 16, 0}, {MaskKind::causal}, false, DType::bf16};
  for (const ElementTypes& types : {narrow, mixed})
    expect_all_right(many, {"contiguous", "dual-chunk-swap"}, types, group(), *library);
  EXPECT_GT(plain.forward.executed, 0);
  EXPECT_GT(plain.backward.executed, 0);
  EXPECT_EQ(to_host(plain.dropped)[0], 0);
}

#ifdef GYRE_WITH_NCCL
/// nullptr, and why not: too few GPUs for this NCCL.
std::unique_ptr<Communicator> nccl_world(std::string& why) {
  setenv("NCCL_MULTI_RANK_GPU_ENABLE", "1", 0);  // ranks may have to share a GPU
  try {
    return make_nccl_communicator(world());
  } catch (const Error& error) {
    if (!error.agreed()) throw;
    why = error.what();
    return nullptr;
  }
}

TEST_F(DeviceAttention, OverNccl) {
  std::string why;
  const auto nccl = nccl_world(why);
  if (nccl == nullptr) GTEST_SKIP() << why;
  expect_all_right({{33, 1, 6}, {4, 2, 16, 0}, {MaskKind::causal}, true}, {"dual-chunk-swap"}, wide,
                   *nccl, reference());
}

/// Operations that the host submits in both directions, of which `replayed` is what graphs submit.
struct Submitted {
  int64_t by_host = 0, replayed = 0;
};
Submitted run_counted(Attention& attention) {
  Submitted submitted;
#ifdef GYRE_SOFTGPU
  const int64_t before = softgpu::host_submissions();
#endif
  attention.run([&] { submitted.replayed += attention.executor().replayed(); });
#ifdef GYRE_SOFTGPU
  submitted.by_host = softgpu::host_submissions() - before;
#endif
  return submitted;
}

/// Of both directions with graphs: two of these, sinks there and gradients back, and now and then
/// the origin of times.
constexpr int64_t max_submissions = 8;

TEST_F(DeviceAttention, RecordedRunsAreTheSameWithOneCall) {
  std::string why;
  const auto nccl = nccl_world(why);
  if (nccl == nullptr) GTEST_SKIP() << why;
  const Problem p = make_problem({{17, 2}, {2, 2, 16, 0}, {MaskKind::causal}, true});
  for (const char* name : {"ring", "all-gather", "group-cast", "all-to-all"}) {
    const Schedule& schedule = find_schedule(name);
    for (const ScheduleOptions& options : test::options_of(schedule)) {
      SCOPED_TRACE(name);
      const Configuration c{schedule, find_layout("dual-chunk-swap"), wide, options};
      Attention attention(p, c, *nccl, kernel(), nullptr, device());
      if (attention.refused()) continue;
      const auto run = [&] {
        poison(attention, wide);
        return run_counted(attention);
      };
      const Submitted singly = run();
      const auto first = bits_of(attention);
      const std::vector<double> d_sinks = attention.executor().d_sinks();
      const auto expect_same = [&] {
        EXPECT_EQ(attention.executor().d_sinks(), d_sinks);
        for (const auto& [token, values] : bits_of(attention))
          EXPECT_TRUE(same_bits(values, first.at(token))) << "token " << token;
      };
      attention.executor().record_runs(true);
#ifdef GYRE_SOFTGPU
      const bool gathers = name == std::string("all-gather") && options.collectives == 1;
      EXPECT_EQ(attention.executor().windows(), gathers && world().size() > 1 ? 2 : 0);
#endif
      EXPECT_EQ(run().replayed, 0);  // before anything is recorded
      EXPECT_GT(run().replayed, 0);  // recorded
      expect_same();
      const Submitted at_once = run();
      EXPECT_LE(at_once.by_host, max_submissions) << singly.by_host << " one by one";
      expect_same();
      Trace trace;
      attention.executor().set_trace(&trace);
      EXPECT_EQ(run().replayed, 0);
      EXPECT_FALSE(trace.spans().empty());
      attention.executor().set_trace(nullptr);
      { Buffer<float> given_back(1, MemorySpace::device); }
      EXPECT_EQ(run().replayed, 0);
      EXPECT_GT(run().replayed, 0);
      expect_same();
      expect_results(p, attention, attention.tolerances());
    }
  }
}

TEST_F(DeviceAttention, PartsOfAPlanAreRecordedByThemselves) {
  std::string why;
  const auto nccl = nccl_world(why);
  if (nccl == nullptr) GTEST_SKIP() << why;
  const Problem p = make_problem({{70, 9}, {4, 2, 16, 0}, {MaskKind::causal}});
  Attention attention(p, {find_schedule("ring"), find_layout("dual-chunk-swap")}, *nccl, kernel(),
                      nullptr, device());
  AttentionExecutor& executor = attention.executor();
  executor.record_runs(true);
  for (int i = 0; i < 3; ++i)
    for (const Pass pass : {Pass::forward, Pass::backward}) {
      const int64_t before = nccl->traffic().bytes_sent;
      const ExecutionTimes alone = executor.run(pass, Execute::compute_only);
      EXPECT_EQ(nccl->traffic().bytes_sent, before);
      EXPECT_EQ(alone.wait, 0);
      EXPECT_GT(alone.compute, 0);
      EXPECT_GE(alone.total, alone.compute + alone.copy);
      const ExecutionTimes moves = executor.run(pass, Execute::communication_only);
      EXPECT_EQ(nccl->traffic().bytes_sent - before,
                count(attention.plan(), pass, p.heads, {}).bytes_sent);
      EXPECT_EQ(moves.compute, 0);
    }
  attention.run();
  expect_results(p, attention, attention.tolerances());
}
#endif

TEST_F(DeviceAttention, GivesTheBitsOfTheHost) {
  // The kernels compute the same numbers; so must everything around them, to the last bit but for
  // deltas, sums in double precision whose order differs.
  const Problem p = make_problem({ragged, {4, 2, 8, 0}, {MaskKind::causal}});
  const auto host_kernel = make_reference_kernel();
  for (const Schedule& schedule : schedules())
    for (const ElementTypes& types : {wide, narrow}) {
      const Configuration c{schedule, find_layout("dual-chunk-swap"), types};
      Attention here(p, c, world(), *host_kernel);
      Attention there(p, c, group(), reference(), nullptr, device());
      if (here.refused()) continue;
      here.executor().run(Pass::forward);
      there.executor().run(Pass::forward);
      const HostCopy out = there.on_host(there.executor().matrix(ArrayKind::out));
      const MatrixRef want = here.executor().matrix(ArrayKind::out);
      here.for_each_own_token(ArrayKind::out, [&](int64_t token, int64_t row) {
        for (int64_t col = 0; col < want.cols; ++col)
          EXPECT_EQ(out.at(row, col), want.at(row, col)) << schedule.name << ", token " << token;
      });
    }
}

TEST_F(DeviceAttention, TheSameRunTwiceGivesTheSameBits) {
  const Problem p = make_problem({{70, 3}, {4, 2, 16, 0}, {MaskKind::causal}, true});
  for (const char* schedule : {"ring", "all-gather", "group-cast", "all-to-all"}) {
    const Configuration c{find_schedule(schedule), find_layout("dual-chunk-swap"), wide};
    Attention attention(p, c, group(), kernel(), nullptr, device());
    attention.run();
    EXPECT_EQ(cudaStreamQuery(handle()), cudaSuccess) << "something is left to be done";
    const auto first = bits_of(attention);
    const std::vector<double> d_sinks = attention.executor().d_sinks();
    poison(attention, wide);
    attention.run();
    EXPECT_EQ(attention.executor().d_sinks(), d_sinks);
    for (const auto& [token, values] : bits_of(attention))
      EXPECT_TRUE(same_bits(values, first.at(token))) << schedule << ", token " << token;
  }
}

TEST_F(DeviceAttention, PartsOfAPlanRunAloneAndTimesAddUp) {
  const Problem p = make_problem({{70, 9}, {4, 2, 16, 0}, {MaskKind::causal}});
  for (const Schedule& schedule : schedules()) {
    SCOPED_TRACE(schedule.name);
    Attention attention(p, {schedule, find_layout("dual-chunk-swap")}, group(), reference(),
                        nullptr, device());
    if (attention.refused()) continue;
    attention.run();
    for (const Pass pass : {Pass::forward, Pass::backward}) {
      const Traffic before = group().traffic();
      const ExecutionTimes alone = attention.executor().run(pass, Execute::compute_only);
      EXPECT_EQ(group().traffic().bytes_sent, before.bytes_sent);
      EXPECT_EQ(alone.wait, 0);
      EXPECT_GT(alone.compute, 0);
      EXPECT_GE(alone.total, alone.compute + alone.copy);
      const ExecutionTimes moves = attention.executor().run(pass, Execute::communication_only);
      EXPECT_EQ(group().traffic().bytes_sent - before.bytes_sent,
                count(attention.plan(), pass, p.heads, {}).bytes_sent);
      EXPECT_EQ(moves.compute, 0);
      EXPECT_GE(moves.total, moves.wait + moves.copy);
    }
    attention.run();
    expect_results(p, attention, attention.tolerances());
  }
}

TEST_F(DeviceAttention, TracesComputeAndMessagesOnTheHostsClock) {
  const Problem p = make_problem({{70, 9}, {4, 2, 16, 0}, {MaskKind::causal}});
  Attention attention(p, {find_schedule("ring"), find_layout("dual-chunk-swap")}, group(), kernel(),
                      nullptr, device());
  Trace trace;
  attention.executor().set_trace(&trace);
  const double begin = Trace::now();
  attention.executor().run(Pass::forward);
  const double end = Trace::now();
  int computes = 0, messages = 0;
  for (const TraceSpan& span : trace.spans()) {
    EXPECT_LE(span.begin, span.end);
    EXPECT_GE(span.begin, begin);
    EXPECT_LE(span.end, end);
    computes += span.kind == SpanKind::compute ? 1 : 0;
    messages += span.kind == SpanKind::message && span.name == "KV" ? 1 : 0;
  }
  EXPECT_EQ(computes, world().size());
  EXPECT_EQ(messages, world().size() - 1);
}

TEST_F(DeviceAttention, RefusesMessagesInAnotherMemory) {
  if (world().size() == 1) return;
  const Problem p = make_problem({{8}, {2, 1, 8, 0}, {}});
  EXPECT_THROW(Attention(p, {find_schedule("ring"), find_layout("contiguous")}, world(), kernel(),
                         nullptr, device()),
               Error);
}

TEST_F(DeviceAttention, AWorkspaceMovesFromOneMemoryToAnother) {
  AttentionWorkspace workspace;
  workspace.storage(0, 100);
  workspace.give_back(workspace.take_staging(100));
  EXPECT_EQ(workspace.bytes(), 200);
  workspace.use(MemorySpace::device);
  EXPECT_EQ(workspace.bytes(), 0);
  workspace.storage(0, 60);
  EXPECT_EQ(workspace.take_staging(8).space(), MemorySpace::device);
  workspace.use(MemorySpace::device);
  EXPECT_EQ(workspace.bytes(), 68);
}

}  // namespace GYRE_FILE
}  // namespace gyre
