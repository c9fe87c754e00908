#include "attention/execute.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include "runtime/clock.hpp"

namespace gyre {
namespace {

constexpr float minus_infinity = -std::numeric_limits<float>::infinity();

Buffer<float> buffer_of_bytes(int64_t bytes) {
  return Buffer<float>(ceil_div(bytes, static_cast<int64_t>(sizeof(float))));
}
int64_t bytes_of(const Buffer<float>& buffer) {
  return buffer.size() * static_cast<int64_t>(sizeof(float));
}

void convert(float from, float& to) {
  to = from;
}
void convert(bf16 from, float& to) {
  to = to_float(from);
}
void convert(float from, bf16& to) {
  to = to_bf16(from);
}
void convert(bf16 from, bf16& to) {
  to = from;
}

/// Calls f with a value of the C++ type behind an element type that attention arrays have.
template <class F>
void with_type(DType type, F f) {
  GYRE_CHECK(type == DType::f32 || type == DType::bf16, "attention arrays of {}", name_of(type));
  if (type == DType::f32)
    f(float{});
  else
    f(bf16{});
}

template <class From, class To>
void copy_row(const From* from, To* to, int64_t count, bool add) {
  if (add) {
    for (int64_t i = 0; i < count; ++i) convert(to_float(to[i]) + to_float(from[i]), to[i]);
  } else {
    for (int64_t i = 0; i < count; ++i) convert(from[i], to[i]);
  }
}

/// Copies, or adds, rows of `planes` pieces of `width` elements; strides in elements.
struct RowCopy {
  int64_t rows, planes, width;
  int64_t from_row, from_plane, to_row, to_plane;
  bool add;

  template <class From, class To>
  void run(const From* from, To* to) const {
    for (int64_t r = 0; r < rows; ++r)
      for (int64_t p = 0; p < planes; ++p)
        copy_row(from + r * from_row + p * from_plane, to + r * to_row + p * to_plane, width, add);
  }
  void run(const std::byte* from, DType from_type, std::byte* to, DType to_type) const {
    with_type(from_type, [&](auto f) {
      with_type(to_type, [&](auto t) {
        run(reinterpret_cast<const decltype(f)*>(from), reinterpret_cast<decltype(t)*>(to));
      });
    });
  }
};

}  // namespace

std::span<std::byte> AttentionWorkspace::storage(int id, int64_t bytes) {
  Buffer<float>& buffer = storages_[id];
  if (bytes_of(buffer) < bytes) {
    buffer = {};  // release first: the two need not fit together
    buffer = buffer_of_bytes(bytes);
  }
  return std::as_writable_bytes(buffer.span()).first(static_cast<size_t>(bytes));
}

Buffer<float> AttentionWorkspace::take_staging(int64_t bytes) {
  auto best = free_.end();  // the smallest that fits, so that larger ones stay for larger messages
  for (auto b = free_.begin(); b != free_.end(); ++b)
    if (bytes_of(*b) >= bytes && (best == free_.end() || b->size() < best->size())) best = b;
  if (best != free_.end()) {
    Buffer<float> staging = std::move(*best);
    free_.erase(best);
    return staging;
  }
  if (!free_.empty()) {
    staging_bytes_ -= bytes_of(free_.back());
    free_.pop_back();  // too small: replaced by a larger one
  }
  Buffer<float> staging = buffer_of_bytes(bytes);
  staging_bytes_ += bytes_of(staging);
  return staging;
}

void AttentionWorkspace::give_back(Buffer<float> staging) {
  free_.push_back(std::move(staging));
}

int64_t AttentionWorkspace::bytes() const {
  int64_t sum = staging_bytes_;
  for (const auto& [id, buffer] : storages_) sum += bytes_of(buffer);
  return sum;
}

AttentionExecutor::AttentionExecutor(const RankPlan& plan, const HeadShape& heads,
                                     const ElementTypes& types, Communicator& group,
                                     BlockKernel& kernel, Stream& stream,
                                     AttentionWorkspace& workspace, bool with_backward)
    : plan_(plan),
      heads_(heads),
      types_(types),
      group_(group),
      kernel_(kernel),
      stream_(stream),
      workspace_(workspace) {
  GYRE_CHECK(plan.rank == group.rank(), "the plan of rank {} on rank {}", plan.rank, group.rank());
  std::map<int, int64_t> bytes;
  const auto use = [&](int index) {
    if (index < 0) return;
    int64_t& most = bytes[array(index).storage];
    most = std::max(most, stored_bytes(array(index), heads_, types_));
  };
  for (int kind = 0; kind < array_kinds; ++kind)
    if (with_backward || kind <= own(ArrayKind::stats)) use(kind);
  const auto use_all = [&](const std::vector<Step>& steps) {
    for (const Step& s : steps) {
      if (const auto* exchange = std::get_if<step::Exchange>(&s))
        for (const auto* messages : {&exchange->sends, &exchange->recvs})
          for (const Message& m : *messages)
            for (const Slice& slice : m.slices) use(slice.array);
      if (const auto* clear = std::get_if<step::Clear>(&s)) use(clear->array);
    }
  };
  use_all(plan.forward);
  if (with_backward) use_all(plan.backward);
  for (const auto& [storage, size] : bytes) workspace_.storage(storage, size);
  for (const PlanArray& a : plan.arrays)
    data_.push_back(bytes.contains(a.storage)
                        ? workspace_.storage(a.storage, stored_bytes(a, heads_, types_))
                        : std::span<std::byte>{});
}

MatrixRef AttentionExecutor::columns(int index, int64_t p, HeadRange part) {
  const PlanArray& a = array(index);
  const int64_t width = row_elements(a.kind, a.heads.count, heads_.head_dim);
  const int64_t plane_width = width / planes_of(a.kind);
  const int64_t dim = a.kind == ArrayKind::stats ? 1 : heads_.head_dim;
  const MatrixRef all{data_[static_cast<size_t>(index)].data(), types_.stored(a.kind), a.tokens(),
                      width, width};
  return all.columns_from(p * plane_width + (part.begin - a.heads.begin) * dim, part.count * dim);
}

MatrixRef AttentionExecutor::plane(int index, int64_t p) {
  return columns(index, p, array(index).heads);
}

MatrixRef AttentionExecutor::matrix_of(int index) {
  MatrixRef all = plane(index, 0);
  all.cols = all.stride;
  return all;
}

std::span<std::byte> AttentionExecutor::place(const Slice& slice) {
  const PlanArray& a = array(slice.array);
  const auto row = static_cast<size_t>(row_elements(a.kind, a.heads.count, heads_.head_dim)) *
                   size_of(types_.stored(a.kind));
  return data_[static_cast<size_t>(slice.array)].subspan(static_cast<size_t>(slice.row) * row,
                                                         static_cast<size_t>(slice.rows) * row);
}

void AttentionExecutor::pack(const Slice& slice, std::span<std::byte> to) {
  const ArrayKind kind = array(slice.array).kind;
  const MatrixRef from = columns(slice.array, 0, slice.heads);
  const int64_t planes = planes_of(kind), width = from.cols;
  const auto skipped = slice.row * from.stride * static_cast<int64_t>(size_of(from.type));
  RowCopy{slice.rows,           planes,         width, from.stride,
          from.stride / planes, planes * width, width, false}
      .run(from.data + skipped, from.type, to.data(), types_.on_wire(kind));
}

void AttentionExecutor::unpack(const Slice& slice, std::span<const std::byte> from) {
  const ArrayKind kind = array(slice.array).kind;
  const MatrixRef to = columns(slice.array, 0, slice.heads);
  const int64_t planes = planes_of(kind), width = to.cols;
  const auto skipped = slice.row * to.stride * static_cast<int64_t>(size_of(to.type));
  RowCopy{slice.rows,         planes,   width, planes * width, width, to.stride,
          to.stride / planes, slice.add}
      .run(from.data(), types_.on_wire(kind), to.data + skipped, to.type);
}

void AttentionExecutor::copy_locally(const step::Exchange& s) {
  const auto slices_of = [&](const std::vector<Message>& messages) {
    std::vector<Slice> slices;
    for (const Message& m : messages)
      if (m.peer == plan_.rank) slices.insert(slices.end(), m.slices.begin(), m.slices.end());
    return slices;
  };
  const std::vector<Slice> sends = slices_of(s.sends), recvs = slices_of(s.recvs);
  GYRE_CHECK(sends.size() == recvs.size(), "{}: {} local slices to {}", s.what, sends.size(),
             recvs.size());
  std::vector<std::byte> wire;  // one row, rounded as if it had travelled
  for (size_t i = 0; i < sends.size(); ++i) {
    Slice from = sends[i], to = recvs[i];
    const int64_t rows = from.rows;
    from.rows = to.rows = 1;
    wire.resize(static_cast<size_t>(wire_bytes(array(from.array).kind, from, heads_, types_)));
    for (int64_t r = 0; r < rows; ++r, ++from.row, ++to.row) {
      pack(from, wire);
      unpack(to, wire);
    }
  }
}

void AttentionExecutor::post(const step::Exchange& s) {
  Pending pending;
  pending.what = s.what;
  std::vector<SendSlice> sends;
  std::vector<RecvSlice> recvs;
  for (const Message& m : s.sends) {
    if (m.peer == plan_.rank) continue;
    for (const Slice& slice : m.slices) {
      const PlanArray& a = array(slice.array);
      if (travels_as_it_lies(a, slice, types_)) {
        sends.push_back({m.peer, place(slice)});
        continue;
      }
      const auto bytes = wire_bytes(a.kind, slice, heads_, types_);
      Buffer<float>& staging = pending.sent.emplace_back(workspace_.take_staging(bytes));
      const auto packed = std::as_writable_bytes(staging.span()).first(static_cast<size_t>(bytes));
      pack(slice, packed);
      sends.push_back({m.peer, packed});
    }
  }
  for (const Message& m : s.recvs) {
    if (m.peer == plan_.rank) continue;
    for (const Slice& slice : m.slices) {
      const PlanArray& a = array(slice.array);
      if (travels_as_it_lies(a, slice, types_) && !slice.add) {
        recvs.push_back({m.peer, place(slice)});
        continue;
      }
      const auto bytes = wire_bytes(a.kind, slice, heads_, types_);
      Copy& copy = pending.received.emplace_back(Copy{slice, workspace_.take_staging(bytes)});
      recvs.push_back(
          {m.peer, std::as_writable_bytes(copy.staging.span()).first(static_cast<size_t>(bytes))});
    }
  }
  copy_locally(s);
  pending.begin = Trace::now();
  pending.work = group_.exchange(sends, recvs, stream_, s.what);
  pending_[s.id] = std::move(pending);
}

void AttentionExecutor::complete(int id) {
  Pending& pending = pending_.at(id);
  pending.work->wait();
  if (trace_ != nullptr)
    trace_->add(TraceLane::communication, pending.what, pending.begin,
                pending.done ? pending.end : Trace::now());
}

void AttentionExecutor::progress() {
  for (auto& [id, pending] : pending_)
    if (!pending.done && pending.work->test()) {
      pending.done = true;
      pending.end = Trace::now();
    }
}

void AttentionExecutor::clear(int index) {
  const ArrayKind kind = array(index).kind;
  const auto data = data_[static_cast<size_t>(index)];
  std::fill(data.begin(), data.end(), std::byte{0});  // 0 in all types
  if (kind != ArrayKind::stats) return;
  const MatrixView<float> lse = plane(index, 0).as<float>();
  for (int64_t r = 0; r < lse.rows; ++r) std::fill_n(lse.row(r), lse.cols, minus_infinity);
}

void AttentionExecutor::compute(const step::Compute& s, Pass pass) {
  const HeadRange q_heads = query_heads_of(array(s.q).heads, s.kv_heads, heads_);
  const int64_t group = heads_.group();
  const int64_t kv_begin = std::max(s.kv_heads.begin, q_heads.begin / group);
  const int64_t kv_end = std::min(s.kv_heads.end(), ceil_div(q_heads.end(), group));
  const HeadRange kv_heads{kv_begin, kv_end - kv_begin};
  BlockInput input;
  input.heads = {
      q_heads.count, kv_heads.count, heads_.head_dim, group, q_heads.begin - kv_begin * group,
      heads_.scale};
  input.q = columns(s.q, 0, q_heads);
  input.k = columns(s.kv, 0, kv_heads);
  input.v = columns(s.kv, 1, kv_heads);
  input.rectangles = s.rectangles;
  input.fixed_tiles = s.fixed_tiles;
  input.progress = [this] { progress(); };
  const MatrixView<float> lse = columns(s.stats, 0, q_heads).as<float>();
  if (pass == Pass::forward) {
    kernel_.forward({input, columns(s.out, 0, q_heads), lse});
    return;
  }
  BackwardBlock block{input, {}, {}, {}, {}, {}, {}};
  block.d_out = columns(s.d_out, 0, q_heads);
  block.lse = lse;
  block.delta = columns(s.stats, 1, q_heads).as<float>();
  if (s.d_q >= 0) block.d_q = columns(s.d_q, 0, q_heads);
  if (s.d_kv >= 0) {
    block.d_k = columns(s.d_kv, 0, kv_heads).as<float>();
    block.d_v = columns(s.d_kv, 1, kv_heads).as<float>();
  }
  kernel_.backward(block);
}

void AttentionExecutor::finish(const step::Finish& s) {
  if (sinks_.empty()) return;
  const PlanArray& stats = array(s.stats);
  const MatrixRef lse_ref = plane(s.stats, 0), out = plane(s.out, 0);
  const MatrixView<float> lse = lse_ref.as<float>();
  for (int64_t h = 0; h < stats.heads.count; ++h) {
    const float sink = sinks_[static_cast<size_t>(stats.heads.begin + h)];
    for (int64_t r = 0; r < lse.rows; ++r) {
      const float before = lse(r, h);
      if (before == minus_infinity) continue;  // padding
      const float top = std::max(before, sink), low = std::min(before, sink);
      const float after = top + std::log1p(std::exp(low - top));
      const float keep = std::exp(before - after);
      lse(r, h) = after;
      with_type(out.type, [&](auto t) {
        using T = decltype(t);
        T* row = out.as<T>().row(r) + h * heads_.head_dim;
        for (int64_t d = 0; d < heads_.head_dim; ++d) convert(to_float(row[d]) * keep, row[d]);
      });
    }
  }
}

void AttentionExecutor::delta(const step::Delta& s) {
  const MatrixView<float> delta = plane(s.stats, 1).as<float>();
  const MatrixRef out = plane(s.out, 0), d_out = plane(s.d_out, 0);
  const int64_t dim = heads_.head_dim;
  with_type(out.type, [&](auto a) {
    with_type(d_out.type, [&](auto b) {
      const auto o = out.as<decltype(a)>();
      const auto d = d_out.as<decltype(b)>();
      for (int64_t r = 0; r < delta.rows; ++r)
        for (int64_t h = 0; h < delta.cols; ++h) {
          double sum = 0;
          for (int64_t i = h * dim; i < (h + 1) * dim; ++i)
            sum += static_cast<double>(to_float(o(r, i))) * static_cast<double>(to_float(d(r, i)));
          delta(r, h) = static_cast<float>(sum);
        }
    });
  });
}

void AttentionExecutor::sink_gradient(const step::SinkGradient& s) {
  if (sinks_.empty()) return;
  const PlanArray& stats = array(s.stats);
  const auto lse = plane(s.stats, 0).as<float>(), delta = plane(s.stats, 1).as<float>();
  for (int64_t h = 0; h < stats.heads.count; ++h) {
    const auto head = static_cast<size_t>(stats.heads.begin + h);
    for (int64_t r = 0; r < lse.rows; ++r)
      if (lse(r, h) != minus_infinity)
        d_sinks_[head] -=
            std::exp(static_cast<double>(sinks_[head]) - static_cast<double>(lse(r, h))) *
            static_cast<double>(delta(r, h));
  }
  if (s.complete) return;
  group_
      .all_reduce(d_sinks_.data(), std::ssize(d_sinks_), DType::f64, ReduceOp::sum, stream_,
                  "gradient of the sinks")
      ->wait();
}

class AttentionExecutor::Walker {
 public:
  Walker(AttentionExecutor& executor, Pass pass, Execute what)
      : executor_(executor), pass_(pass), what_(what) {}

  void operator()(const step::Exchange& s) {
    if (what_ != Execute::compute_only) timed(times_.copy, [&] { executor_.post(s); });
  }
  void operator()(const step::Wait& s) {
    if (what_ == Execute::compute_only) return;
    timed(
        times_.wait, [&] { executor_.complete(s.id); }, "wait");
    timed(times_.copy, [&] {
      AttentionExecutor::Pending& pending = executor_.pending_.at(s.id);
      for (AttentionExecutor::Copy& copy : pending.received) {
        executor_.unpack(copy.slice, std::as_bytes(copy.staging.span()));
        executor_.workspace_.give_back(std::move(copy.staging));
      }
      for (Buffer<float>& sent : pending.sent) executor_.workspace_.give_back(std::move(sent));
      executor_.pending_.erase(s.id);
    });
  }
  void operator()(const step::Clear& s) {
    local(times_.copy, [&] { executor_.clear(s.array); });
  }
  void operator()(const step::Compute& s) {
    local(
        times_.compute, [&] { executor_.compute(s, pass_); }, "attention");
  }
  void operator()(const step::Finish& s) {
    local(times_.copy, [&] { executor_.finish(s); });
  }
  void operator()(const step::Delta& s) {
    local(times_.copy, [&] { executor_.delta(s); });
  }
  void operator()(const step::SinkGradient& s) {
    local(times_.copy, [&] { executor_.sink_gradient(s); });
  }
  const ExecutionTimes& times() const { return times_; }

 private:
  template <class Body>
  void timed(double& seconds, Body body, const char* name = nullptr) {
    const double begin = Trace::now();
    body();
    const double end = Trace::now();
    seconds += end - begin;
    if (executor_.trace_ != nullptr && name != nullptr)
      executor_.trace_->add(TraceLane::compute, name, begin, end);
  }
  template <class Body>
  void local(double& seconds, Body body, const char* name = nullptr) {
    if (what_ != Execute::communication_only) timed(seconds, body, name);
  }

  AttentionExecutor& executor_;
  Pass pass_;
  Execute what_;
  ExecutionTimes times_;
};

ExecutionTimes AttentionExecutor::run(Pass pass, Execute what) {
  const Stopwatch watch;
  if (pass == Pass::backward)
    d_sinks_.assign(sinks_.empty() ? 0 : static_cast<size_t>(heads_.heads), 0.0);
  Walker walker(*this, pass, what);
  for (const Step& s : plan_.steps(pass)) std::visit(walker, s);
  GYRE_CHECK(pending_.empty(), "{} exchanges of schedule were never waited for", pending_.size());
  ExecutionTimes times = walker.times();
  times.total = watch.seconds();
  return times;
}

}  // namespace gyre
