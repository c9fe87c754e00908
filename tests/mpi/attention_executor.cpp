// What the executor of plans does beyond right results: when it posts and waits, what it leaves
// alone, what it rounds, how much memory it takes, which plans it refuses.

#include <algorithm>
#include <functional>

#include "attention/execute.hpp"
#include "attention_run.hpp"
#include "comm/agree.hpp"

namespace gyre {
namespace GYRE_FILE {

using test::Attention;
using test::bits_of;
using test::Configuration;
using test::expect_results;
using test::make_problem;
using test::Problem;
using test::ProblemSpec;
using test::same_bits;
using test::world;
using Words = std::vector<std::string>;

/// What happened, in order, and how often work under way was tested while a kernel ran.
struct Log {
  Words events;
  bool computing = false;
  int tests_while_computing = 0;
};

class LoggedWork final : public Work {
 public:
  LoggedWork(WorkPtr work, std::string what, Log& log)
      : work_(std::move(work)), what_(std::move(what)), log_(log) {}
  bool test() override {
    if (log_.computing) ++log_.tests_while_computing;
    return work_->test();
  }
  void wait() override {
    log_.events.push_back("wait " + what_);
    work_->wait();
  }

 private:
  WorkPtr work_;
  std::string what_;
  Log& log_;
};

/// The ranks of another communicator, with a log.
class LoggedCommunicator final : public Communicator {
 public:
  LoggedCommunicator(Communicator& inner, Log& log) : inner_(inner), log_(log) {}
  int rank() const override { return inner_.rank(); }
  int size() const override { return inner_.size(); }
  MemorySpace space() const override { return inner_.space(); }
  std::string_view backend() const override { return inner_.backend(); }
  std::unique_ptr<Communicator> split(int color) override { return inner_.split(color); }

 protected:
  WorkPtr do_exchange(std::span<const SendSlice> sends, std::span<const RecvSlice> recvs,
                      Stream& stream, std::string_view what) override {
    log_.events.push_back("post " + std::string(what));
    return std::make_unique<LoggedWork>(inner_.exchange(sends, recvs, stream, what),
                                        std::string(what), log_);
  }
  WorkPtr do_collective(const Collective& call, Stream& stream, std::string_view what) override {
    if (call.kind == Collective::Kind::all_reduce)
      log_.events.push_back("reduce " + std::string(what));
    return inner_.collective(call, stream, what);
  }

 private:
  Communicator& inner_;
  Log& log_;
};

class LoggedKernel final : public BlockKernel {
 public:
  explicit LoggedKernel(Log& log) : log_(log) {}
  void forward(const ForwardBlock& block) override {
    run([&] { kernel_->forward(block); });
  }
  void backward(const BackwardBlock& block) override {
    run([&] { kernel_->backward(block); });
  }

 private:
  void run(const std::function<void()>& call) {
    log_.events.emplace_back("compute");
    log_.computing = true;
    call();
    log_.computing = false;
  }
  std::unique_ptr<BlockKernel> kernel_ = make_cpu_kernel();
  Log& log_;
};

const HeadShape four_heads = {4, 2, 8, 0};

/// What an attention under dual-chunk-swap does, both directions.
std::array<Words, 2> events_of(const Problem& p, const char* schedule) {
  Log log;
  LoggedCommunicator group(world(), log);
  LoggedKernel kernel(log);
  Attention attention(p, {find_schedule(schedule), find_layout("dual-chunk-swap")}, group, kernel);
  std::array<Words, 2> events;
  for (const Pass pass : {Pass::forward, Pass::backward}) {
    log.events.clear();
    attention.executor().run(pass);
    events.at(pass == Pass::forward ? 0 : 1) = log.events;
  }
  return events;
}

TEST(AttentionExecutor, PostsEachHopOfARingBeforeTheStepThatHidesIt) {
  const int cp = world().size();
  const Problem p = make_problem({{16 * cp}, four_heads, {}});
  const auto [forward, backward] = events_of(p, "ring");
  Words expected;
  for (int i = 0; i + 1 < cp; ++i)
    for (const char* word : {"post KV", "compute", "wait KV"}) expected.emplace_back(word);
  expected.emplace_back("compute");
  EXPECT_EQ(forward, expected);
  expected.clear();
  for (int i = 0; i < cp; ++i) {
    const bool block = i<cp - 2, gradient = i> 0;
    const std::string what = block && gradient ? "KV and dKV" : block ? "KV" : "dKV";
    if (block || gradient) expected.push_back("post " + what);
    expected.emplace_back("compute");
    if (block || gradient) expected.push_back("wait " + what);
  }
  EXPECT_EQ(backward, expected);
}

TEST(AttentionExecutor, PostsAGatherBeforeOwnKeysAndHopsBeforeTheNextOwnersTerms) {
  const int cp = world().size();
  const Problem p = make_problem({{16 * cp}, four_heads, {}});
  const auto [forward, backward] = events_of(p, "all-gather");
  Words expected = {"post all-gather KV", "compute", "wait all-gather KV", "compute"};
  if (cp == 1) expected = {"compute"};
  EXPECT_EQ(forward, expected);
  if (cp > 1) expected.pop_back();
  for (int s = 0; s + 1 < cp; ++s) {
    expected.emplace_back("compute");
    if (s > 0) expected.emplace_back("wait reduce-scatter dKV");
    expected.emplace_back("post reduce-scatter dKV");
  }
  if (cp > 1) expected.emplace_back("wait reduce-scatter dKV");
  EXPECT_EQ(backward, expected);
}

TEST(AttentionExecutor, SumsTheGradientOfSinksOverTheGroupOnce) {
  const Problem p = make_problem({{40, 3}, four_heads, {}, true});
  for (const Schedule& schedule : schedules()) {
    if (schedule.name == "halo") continue;
    const auto [forward, backward] = events_of(p, schedule.name.c_str());
    const std::string sum = "reduce gradient of the sinks";
    EXPECT_EQ(std::count(forward.begin(), forward.end(), sum), 0) << schedule.name;
    // Canonical has all rows everywhere; one rank alone sums nothing.
    const bool sums = world().size() > 1 && schedule.name != "canonical";
    EXPECT_EQ(std::count(backward.begin(), backward.end(), sum), sums ? 1 : 0) << schedule.name;
  }
}

TEST(AttentionExecutor, DrivesTransfersWhileAKernelRuns) {
  const int64_t cp = world().size();
  // A document on each rank: only the step on own keys computes, in several tiles.
  const Problem p = make_problem({std::vector<int64_t>(cp, 300), {2, 1, 16, 0}, {}});
  Log log;
  LoggedCommunicator group(world(), log);
  LoggedKernel kernel(log);
  Attention attention(p, {find_schedule("ring"), find_layout("contiguous")}, group, kernel);
  for (const Pass pass : {Pass::forward, Pass::backward}) {
    log.tests_while_computing = 0;
    attention.executor().run(pass);
    if (cp > 1) {
      EXPECT_GT(log.tests_while_computing, 0) << name_of(pass);
    } else {
      EXPECT_EQ(log.tests_while_computing, 0);
    }
  }
}

/// Fills all that a plan uses, but the inputs, and all free copies of messages.
void fill_arrays(Attention& attention, const ElementTypes& types, float value) {
  const RankPlan& plan = attention.plan();
  const auto fill = [&](std::span<std::byte> bytes, DType type) {
    if (type == DType::f32)
      std::fill_n(reinterpret_cast<float*>(bytes.data()), bytes.size() / sizeof(float), value);
    else
      std::fill_n(reinterpret_cast<bf16*>(bytes.data()), bytes.size() / sizeof(bf16),
                  to_bf16(value));
  };
  AttentionWorkspace& workspace = attention.workspace();
  for (int i = 0; i < std::ssize(plan.arrays); ++i) {
    if (i == own(ArrayKind::q) || i == own(ArrayKind::kv) || i == own(ArrayKind::d_out)) continue;
    const PlanArray& a = plan.arrays[i];
    const int64_t bytes = stored_bytes(a, attention.problem().heads, types);
    fill(workspace.storage(a.storage, bytes), types.stored(a.kind));
  }
  std::vector<Buffer<float>> free;
  for (const int64_t bytes = workspace.bytes(); workspace.bytes() == bytes;)
    free.push_back(workspace.take_staging(1));
  for (Buffer<float>& buffer : free) {
    std::fill(buffer.span().begin(), buffer.span().end(), value);
    workspace.give_back(std::move(buffer));
  }
}

TEST(AttentionExecutor, ReadsNothingThatARunBeforeHasLeft) {
  const auto kernel = make_cpu_kernel();
  const ProblemSpec spec{{37, 0, 1, 2, 5, 19}, four_heads, {MaskKind::causal, 20}, true};
  ProblemSpec other_spec = spec;
  other_spec.seed = 12;
  const Problem p = make_problem(spec), other = make_problem(other_spec);
  for (const DType type : {DType::f32, DType::bf16}) {
    const ElementTypes types{DType::f32, type, type, type};
    AttentionWorkspace shared;  // by all schedules, one after the other
    for (const Schedule& schedule : schedules())
      for (const char* layout : {"dual-chunk-swap", "striped"}) {
        const Configuration c{schedule, find_layout(layout), types};
        Attention fresh(p, c, world(), *kernel);
        if (fresh.refused()) continue;
        fresh.run();
        const auto expected = bits_of(fresh);
        Attention before(other, c, world(), *kernel, &shared);
        before.run();
        for (const float poison : {0.0F, NAN, 1e30F}) {
          Attention after(p, c, world(), *kernel, &shared);
          if (poison != 0) fill_arrays(after, types, poison);
          after.run();
          for (const auto& [token, values] : bits_of(after))
            EXPECT_TRUE(same_bits(values, expected.at(token)))
                << schedule.name << ", " << layout << ", token " << token << " after " << poison;
          EXPECT_EQ(after.executor().d_sinks(), fresh.executor().d_sinks()) << schedule.name;
        }
      }
  }
}

TEST(AttentionExecutor, TakesTheMemoryThatThePlanCounts) {
  const auto kernel = make_cpu_kernel();
  const Problem p = make_problem({{128, 5}, {4, 2, 16, 0}, {MaskKind::causal, 9}});
  for (const Schedule& schedule : schedules())
    for (const DType wire : {DType::f32, DType::bf16}) {
      const ElementTypes types{wire, DType::f32, DType::f32, wire};
      Attention attention(p, {schedule, find_layout("dual-chunk-swap"), types, {0, 1}}, world(),
                          *kernel);
      if (attention.refused()) continue;
      const RankPlan& plan = attention.plan();
      AttentionWorkspace workspace;
      HostStream stream;
      AttentionExecutor run(plan, p.heads, types, world(), *kernel, stream, workspace, false);
      for (const MatrixRef m : {run.matrix(ArrayKind::q), run.matrix(ArrayKind::kv)})
        for (int64_t r = 0; r < m.rows; ++r)
          std::memset(m.data + r * m.stride * static_cast<int64_t>(size_of(m.type)), 0,
                      m.stride * size_of(m.type));
      run.run(Pass::forward);
      int64_t inputs_and_results = 0;
      for (int kind = 0; kind <= own(ArrayKind::stats); ++kind)
        inputs_and_results += stored_bytes(plan.arrays[kind], p.heads, types);
      const int64_t counted = count(plan, Pass::forward, p.heads, types).transient_bytes;
      const int64_t taken = workspace.bytes() - inputs_and_results;
      // Buffers are reused for smaller messages, which heads exchanged for tokens may be.
      const int64_t block = stored_bytes(plan.arrays[own(ArrayKind::kv)], p.heads, types);
      const bool alike = schedule.name != "all-to-all" && schedule.name != "all-to-all-ring";
      EXPECT_GE(taken, counted) << schedule.name << ", " << name_of(wire);
      EXPECT_LE(taken, counted + (alike ? 0 : block)) << schedule.name << ", " << name_of(wire);
      const int64_t once = workspace.bytes();
      run.run(Pass::forward);
      EXPECT_EQ(workspace.bytes(), once) << schedule.name << ": grows from run to run";
    }
}

TEST(AttentionExecutor, PartsOfARunDoWhatTheySay) {
  Log log;
  LoggedCommunicator group(world(), log);
  LoggedKernel kernel(log);
  const Problem p = make_problem({{70, 9}, four_heads, {}});
  for (const Schedule& schedule : schedules()) {
    Attention attention(p, {schedule, find_layout("dual-chunk-swap")}, group, kernel);
    if (attention.refused()) continue;
    attention.run();
    const auto results = bits_of(attention);
    for (const Pass pass : {Pass::forward, Pass::backward}) {
      SCOPED_TRACE(schedule.name + ", " + name_of(pass));
      int computes = 0, exchanges = 0;
      for (const Step& s : attention.plan().steps(pass)) {
        computes += std::holds_alternative<step::Compute>(s) ? 1 : 0;
        exchanges += std::holds_alternative<step::Exchange>(s) ? 1 : 0;
      }
      log.events.clear();
      const ExecutionTimes alone = attention.executor().run(pass, Execute::compute_only);
      EXPECT_EQ(log.events, Words(computes, "compute"));
      EXPECT_EQ(alone.wait, 0);
      log.events.clear();
      const Traffic before = group.traffic();
      const ExecutionTimes moves = attention.executor().run(pass, Execute::communication_only);
      EXPECT_EQ(std::ssize(log.events), 2 * exchanges);
      EXPECT_EQ(std::count(log.events.begin(), log.events.end(), "compute"), 0);
      EXPECT_EQ(group.traffic().bytes_sent - before.bytes_sent,
                count(attention.plan(), pass, p.heads, {}).bytes_sent);
      EXPECT_EQ(moves.compute, 0);
      EXPECT_EQ(moves.wait > 0, exchanges > 0);
      EXPECT_GE(moves.total, moves.wait + moves.copy);
    }
    attention.run();
    for (const auto& [token, values] : bits_of(attention))
      EXPECT_TRUE(same_bits(values, results.at(token))) << schedule.name << ", token " << token;
  }
}

/// A part of what a rank got, by token: out, d_q, d_k or d_v.
TEST(AttentionExecutor, ItsTraceHoldsEveryStepAndEveryMessageOfThePlan) {
  const int cp = world().size();
  const Problem p = make_problem({{16 * cp, 9}, {8, 8, 8, 0}, {}, true});
  const std::unique_ptr<BlockKernel> kernel = make_cpu_kernel();
  for (const Schedule& schedule : schedules()) {
    Attention attention(p, {schedule, find_layout("dual-chunk-swap")}, world(), *kernel);
    if (attention.refused()) continue;
    const RankPlan& plan = attention.plan();
    for (const Pass pass : {Pass::forward, Pass::backward}) {
      Trace trace;
      attention.executor().set_trace(&trace);
      const double begin = Trace::now();
      attention.executor().run(pass);
      const double end = Trace::now();
      attention.executor().set_trace(nullptr);
      PlanCount sent;
      double computing = begin;  // each step begins where the one before it ends
      int computes = 0;
      for (const TraceSpan& span : trace.spans()) {
        EXPECT_EQ(span.direction, name_of(pass));
        EXPECT_EQ(span.lane == TraceLane::communication, span.kind == SpanKind::message);
        EXPECT_GE(span.begin, begin);
        EXPECT_GE(span.end, span.begin);
        EXPECT_LE(span.end, end);
        if (span.kind != SpanKind::message) {
          if (computing > begin) {
            EXPECT_EQ(span.begin, computing) << span.name;
          }
          computing = span.end;
          computes += span.kind == SpanKind::compute ? 1 : 0;
          continue;
        }
        const Step& step = plan.steps(pass).at(span.step);
        EXPECT_EQ(span.name, std::get<step::Exchange>(step).what);
        sent.messages += std::ssize(span.sent);
        for (const TraceMessage& m : span.sent) sent.bytes_sent += m.bytes;
        for (const TraceMessage& m : span.received) sent.bytes_received += m.bytes;
      }
      const PlanCount planned = count(plan, pass, p.heads, {});
      EXPECT_EQ(sent.messages, planned.messages) << schedule.name;
      EXPECT_EQ(sent.bytes_sent, planned.bytes_sent) << schedule.name;
      EXPECT_EQ(sent.bytes_received, planned.bytes_received) << schedule.name;
      EXPECT_EQ(computes,
                std::count_if(plan.steps(pass).begin(), plan.steps(pass).end(), [](const Step& s) {
                  return std::holds_alternative<step::Compute>(s);
                }));
    }
  }
}

struct Results {
  std::vector<float> out, d_q, d_k, d_v;
};
Results results_of(Attention& attention) {
  Results results;
  AttentionExecutor& run = attention.executor();
  attention.for_each_own_token(ArrayKind::out, [&](int64_t, int64_t row) {
    const auto take = [&](MatrixRef from, std::vector<float>& to) {
      for (int64_t c = 0; c < from.cols; ++c) to.push_back(from.at(row, c));
    };
    take(run.matrix(ArrayKind::out), results.out);
    take(run.matrix(ArrayKind::d_q), results.d_q);
    take(run.d_keys(), results.d_k);
    take(run.d_values(), results.d_v);
  });
  return results;
}
/// Share of values that bf16 can hold.
double narrow_share(const std::vector<float>& values) {
  int64_t narrow = 0;
  for (const float x : values) narrow += to_float(to_bf16(x)) == x ? 1 : 0;
  return static_cast<double>(narrow) / static_cast<double>(values.size());
}

TEST(AttentionExecutor, RoundsToBf16WhereAskedAndNowhereElse) {
  const auto kernel = make_cpu_kernel();
  const Problem p = make_problem({{40 * world().size()}, four_heads, {}});
  const bool travels = world().size() > 1;
  for (const char* schedule : {"ring", "ring-forward", "all-gather", "group-cast", "all-to-all"}) {
    SCOPED_TRACE(schedule);
    const auto run = [&](const ElementTypes& types) {
      Attention attention(p, {find_schedule(schedule), find_layout("dual-chunk-swap"), types},
                          world(), *kernel);
      attention.run();
      return results_of(attention);
    };
    const DType wide = DType::f32, narrow = DType::bf16;
    const Results exact = run({wide, wide, wide, wide});
    EXPECT_LT(narrow_share(exact.out), 0.1);
    EXPECT_LT(narrow_share(exact.d_q), 0.1);
    EXPECT_LT(narrow_share(exact.d_k), 0.1);

    const Results wire = run({wide, wide, wide, narrow});
    EXPECT_TRUE(same_bits(wire.out, exact.out));
    EXPECT_TRUE(same_bits(wire.d_q, exact.d_q));
    EXPECT_EQ(same_bits(wire.d_k, exact.d_k), !travels);
    EXPECT_EQ(same_bits(wire.d_v, exact.d_v), !travels);

    const Results d_q = run({wide, wide, narrow, wide});
    EXPECT_TRUE(same_bits(d_q.out, exact.out));
    EXPECT_EQ(narrow_share(d_q.d_q), 1);
    EXPECT_TRUE(same_bits(d_q.d_k, exact.d_k));
    EXPECT_TRUE(same_bits(d_q.d_v, exact.d_v));

    const Results out = run({wide, narrow, wide, wide});
    EXPECT_EQ(narrow_share(out.out), 1);
    EXPECT_LT(narrow_share(out.d_q), 0.1);
    EXPECT_TRUE(same_bits(out.d_v, exact.d_v) || travels);  // depends on out through LSE only

    // Of bf16 inputs everything but the inputs stays f32; all-to-all sends out and d_q in bf16.
    const Results inputs = run({narrow, wide, wide, wide});
    const bool narrowed = travels && std::string(schedule) == "all-to-all";
    EXPECT_EQ(narrow_share(inputs.out) == 1, narrowed);
    EXPECT_EQ(narrow_share(inputs.d_q) == 1, narrowed);
    EXPECT_LT(narrow_share(inputs.d_k), 0.1);
  }
}

/// Sum of squared errors of one result over all ranks and tokens.
double error_of(const Problem& p, Attention& attention, MatrixRef got,
                const std::vector<double>& want) {
  double sum = 0;
  attention.for_each_own_token(ArrayKind::out, [&](int64_t token, int64_t row) {
    for (int64_t c = 0; c < got.cols; ++c)
      sum += std::pow(static_cast<double>(got.at(row, c)) - want[token * got.cols + c], 2);
  });
  return all_reduce_value(world(), sum / static_cast<double>(p.offsets.back()), ReduceOp::sum);
}

TEST(AttentionExecutor, WiderPartialsAndGradientsOnTheWayGiveSmallerErrors) {
  const auto kernel = make_cpu_kernel();
  const Problem p = make_problem({{64 * world().size()}, four_heads, {}, false, DType::bf16});
  const auto errors = [&](const ElementTypes& types) {
    Attention attention(p, {find_schedule("ring"), find_layout("dual-chunk-swap"), types}, world(),
                        *kernel);
    attention.run();
    AttentionExecutor& run = attention.executor();
    return std::array{error_of(p, attention, run.matrix(ArrayKind::out), p.expected.out),
                      error_of(p, attention, run.matrix(ArrayKind::d_q), p.expected.d_q),
                      error_of(p, attention, run.d_keys(), p.expected.d_k)};
  };
  const DType wide = DType::f32, narrow = DType::bf16;
  const auto best = errors({narrow, wide, wide, wide});
  EXPECT_GT(errors({narrow, narrow, wide, wide})[0], 100 * best[0]);
  EXPECT_GT(errors({narrow, wide, narrow, wide})[1], 100 * best[1]);
  if (world().size() > 1) {
    EXPECT_GT(errors({narrow, wide, wide, narrow})[2], 100 * best[2]);
  }
}

TEST(AttentionExecutor, InnerGroupsAndHeadStagesOfEverySizeWithSinks) {
  const auto kernel = make_cpu_kernel();
  // One KV head for all, groups that ranks cut, KV heads that no rank shares.
  for (const HeadShape& heads :
       {HeadShape{6, 1, 8, 0}, HeadShape{6, 2, 8, 0}, HeadShape{8, 8, 8, 0}}) {
    const Problem p = make_problem({{37, 0, 1, 2, 5, 19}, heads, {}, true});
    for (const LayoutKind& layout : layout_kinds()) {
      const auto expect_right = [&](const char* name, const ScheduleOptions& options) {
        SCOPED_TRACE(fmt::format("{}, {}, {} heads of {}, inner {}, {} heads at once", name,
                                 layout.name, heads.heads, heads.kv_heads, options.inner,
                                 options.heads_at_once));
        Attention attention(p, {find_schedule(name), layout, {}, options}, world(), *kernel);
        attention.run();
        expect_results(p, attention, attention.tolerances());
      };
      for (int inner = 1; inner <= world().size(); ++inner)
        if (world().size() % inner == 0) expect_right("all-to-all-ring", {inner, 1});
      for (const int64_t at_once : {1, 3, 8})
        if (at_once <= heads.kv_heads) expect_right("all-gather-strided", {0, at_once});
    }
  }
}

/// The message of the runtime error of some work, without the place in the source.
std::string failure(const std::function<void()>& work) {
  try {
    work();
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ExitCode::runtime);
    const std::string message = error.what();
    const size_t place = message.find(".cpp:");
    return place == std::string::npos ? message : message.substr(message.find(": ", place) + 2);
  }
  return "no error";
}

TEST(AttentionExecutor, RefusesPlansThatItCannotRun) {
  // Every rank alone, so that nobody waits for one that failed.
  const auto alone = world().split(world().rank());
  const auto kernel = make_cpu_kernel();
  const std::vector<int32_t> bounds = {0, 4};
  LayoutOptions options;
  options.cp = 1;
  const Layout layout = find_layout("contiguous").make({bounds, bounds}, options);
  const AttentionProblem problem{&layout, {2, 1, 4, 0.5F}, {}, {}};
  const auto run = [&](const std::function<void(RankPlan&)>& spoil, const ElementTypes& types) {
    RankPlan plan = plan_rank(find_schedule("ring"), problem, 0);
    spoil(plan);
    AttentionWorkspace workspace;
    HostStream stream;
    AttentionExecutor executor(plan, problem.heads, types, *alone, *kernel, stream, workspace,
                               false);
    executor.run(Pass::forward);
  };
  EXPECT_EQ(failure([&] { run([](RankPlan& plan) { plan.rank = 1; }, {}); }),
            "the plan of rank 1 on rank 0");
  const Slice out{own(ArrayKind::out), 0, 4, {0, 2}};
  const auto exchange = [&](const std::vector<Message>& sends, const std::vector<Message>& recvs) {
    return [=](RankPlan& plan) {
      plan.forward = {step::Clear{own(ArrayKind::out)}, step::Exchange{3, "O", sends, recvs}};
    };
  };
  EXPECT_EQ(failure([&] {
              run(exchange({{0, {out}}}, {{0, {out}}}), {});
            }),
            "1 exchanges of the schedule were never waited for");
  EXPECT_EQ(failure([&] {
              run(exchange({{0, {out}}}, {{0, {out, out}}}), {});
            }),
            "O: 1 local slices to 2");
  EXPECT_EQ(failure([&] { run(exchange({{1, {out}}}, {}), {}); }), "O: send to rank 1 of 1");
  EXPECT_EQ(failure([&] { run(exchange({}, {{-1, {out}}}), {}); }), "O: receive from rank -1 of 1");
}

/// Words that say where they came from and which they are.
std::vector<int64_t> words_of(int rank, int64_t count) {
  std::vector<int64_t> words(count);
  for (int64_t i = 0; i < count; ++i) words[i] = rank * (int64_t{1} << 32) + i;
  return words;
}

TEST(Messages, OfManyLargePartsArriveCutInAnotherWay) {
  const int n = world().size(), r = world().rank(), next = (r + 1) % n, previous = (r + n - 1) % n;
  constexpr int64_t count = 300000;  // 2.4 MB: more than any eager message
  const std::vector<int64_t> sent = words_of(r, count);
  std::vector<int64_t> received(count, -1);
  const auto from = std::as_bytes(std::span(sent));
  const auto to = std::as_writable_bytes(std::span(received));
  std::vector<SendSlice> sends;
  std::vector<RecvSlice> recvs;
  for (const auto& [begin, bytes] : std::vector<std::pair<size_t, size_t>>{
           {0, 8}, {8, 0}, {8, 1200000}, {1200008, 3}, {1200011, 1199989}})
    sends.push_back({next, from.subspan(begin, bytes)});
  for (const auto& [begin, bytes] :
       std::vector<std::pair<size_t, size_t>>{{0, 700001}, {700001, 1699999}, {2400000, 0}})
    recvs.push_back({previous, to.subspan(begin, bytes)});
  HostStream stream;
  const Traffic before = world().traffic();
  world().exchange(sends, recvs, stream, "parts")->wait();
  EXPECT_EQ(received, words_of(previous, count));
  EXPECT_EQ(world().traffic().bytes_sent - before.bytes_sent, n > 1 ? 8 * count : 0);
  EXPECT_EQ(world().traffic().messages - before.messages, n > 1 ? 1 : 0);
}

TEST(Messages, TestIsTrueOnlyWhenEverythingIsThere) {
  const int n = world().size(), r = world().rank();
  HostStream stream;
  const std::vector<int64_t> sent = words_of(r, 1000);
  std::vector<int64_t> received(1000, -1);
  // The last rank sends to rank 0 only after rank 0 has asked.
  if (n > 1 && r == 0) {
    const std::array recvs = {RecvSlice{n - 1, std::as_writable_bytes(std::span(received))}};
    const WorkPtr work = world().exchange({}, recvs, stream, "late");
    EXPECT_FALSE(work->test());
    const std::array go = {SendSlice{n - 1, std::as_bytes(std::span(sent)).first(8)}};
    world().exchange(go, {}, stream, "go")->wait();
    work->wait();
    EXPECT_TRUE(work->test());
    EXPECT_EQ(received, words_of(n - 1, 1000));
  } else if (n > 1 && r == n - 1) {
    const std::array go = {RecvSlice{0, std::as_writable_bytes(std::span(received)).first(8)}};
    world().exchange({}, go, stream, "go")->wait();
    const std::array sends = {SendSlice{0, std::as_bytes(std::span(sent))}};
    world().exchange(sends, {}, stream, "late")->wait();
  }
}

TEST(Messages, LargerThanMpiCanCountAreRefusedByName) {
  // Nothing of so much memory is read: it is refused before anything is posted.
  const int next = (world().rank() + 1) % world().size();
  std::byte first{};
  HostStream stream;
  const std::array sends = {SendSlice{next, std::span<const std::byte>(&first, size_t{1} << 31)}};
  EXPECT_EQ(failure([&] { world().exchange(sends, {}, stream, "KV"); }),
            "KV: 2147483648 elements are more than one MPI call takes (2147483647)");
  // So are parts that fit one by one, but not behind each other.
  if (world().size() < 3) return;
  std::vector<int64_t> parts(world().size(), 0);
  std::fill_n(parts.begin(), 2, int64_t{1} << 30);
  const auto mine = static_cast<size_t>(parts[world().rank()]);
  EXPECT_EQ(failure([&] {
              world().all_gather_v({&first, mine}, {&first, size_t{1} << 31}, parts, stream, "ids");
            }),
            "ids: 2147483648 elements are more than one MPI call takes (2147483647)");
}

TEST(Messages, CollectivesCountTheBytesOfTheBestAlgorithm) {
  const int n = world().size(), r = world().rank();
  HostStream stream;
  const auto counted = [&](const std::function<WorkPtr()>& post) {
    const Traffic before = world().traffic();
    post()->wait();
    return std::array{world().traffic().bytes_sent - before.bytes_sent,
                      world().traffic().messages - before.messages};
  };
  const int64_t one = n > 1 ? 1 : 0;
  std::vector<float> all(6 * n, 1), mine(6, 1);
  std::vector<std::byte> bytes(10), blocks(10 * n), others(blocks.size());
  EXPECT_EQ(counted([&] {
              return world().reduce_scatter(all.data(), mine.data(), 6, DType::f32, ReduceOp::sum,
                                            stream, "scatter");
            }),
            (std::array<int64_t, 2>{(n - 1) * 24, one}));
  EXPECT_EQ(mine, std::vector<float>(6, static_cast<float>(n)));
  EXPECT_EQ(counted([&] { return world().broadcast(bytes, 0, stream, "broadcast"); }),
            (std::array<int64_t, 2>{r == 0 && n > 1 ? 10 : 0, one}));
  EXPECT_EQ(counted([&] { return world().all_to_all(blocks, others, stream, "all-to-all"); }),
            (std::array<int64_t, 2>{(n - 1) * 10, one}));
  EXPECT_EQ(counted([&] { return world().all_gather(bytes, blocks, stream, "all-gather"); }),
            (std::array<int64_t, 2>{(n - 1) * 10, one}));
}

}  // namespace GYRE_FILE
}  // namespace gyre
