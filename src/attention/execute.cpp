#include "attention/execute.hpp"

#include <fmt/format.h>

#include <algorithm>

#include "attention/step_walker.hpp"
#include "core/special_values.hpp"
#include "runtime/cuda_memory.hpp"
#include "runtime/profile_range.hpp"

namespace gyre {
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
  GYRE_CHECK(group.size() == 1 || group.space() == stream.space(),
             "messages of {} memory, arrays in {} memory", name_of(group.space()),
             name_of(stream.space()));
  GYRE_CHECK(plan.rank == group.rank(), "the plan of rank {} on rank {}", plan.rank, group.rank());
  workspace_.use(stream.space());
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
      if (const auto* exchange = std::get_if<step::Exchange>(&s)) {
        for (const auto* messages : {&exchange->sends, &exchange->recvs})
          for (const Message& m : *messages)
            for (const Slice& slice : m.slices) use(slice.array);
        if (exchange->transport != Transport::messages) group.subgroup(exchange->group);
      }
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
  const int64_t width = row_elements(a.kind, a.heads.count, heads_);
  const int64_t plane = p == 0 ? 0 : a.heads.count * plane_dim(a.kind, 0, heads_);
  const int64_t dim = plane_dim(a.kind, p, heads_);
  const MatrixRef all{data_[index].data(), types_.stored(a.kind), a.tokens(), width, width};
  return all.columns_from(plane + (part.begin - a.heads.begin) * dim, part.count * dim);
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
  const auto row = row_elements(a.kind, a.heads.count, heads_) * size_of(types_.stored(a.kind));
  return data_[slice.array].subspan(slice.row * row, slice.rows * row);
}

RowPlace AttentionExecutor::in_array(const Slice& slice) {
  const MatrixRef rows = columns(slice.array, 0, slice.heads);
  const int64_t size = size_of(rows.type), last = planes_of(array(slice.array).kind) - 1;
  const std::byte* const last_plane = columns(slice.array, last, slice.heads).data;
  return {rows.data + slice.row * rows.stride * size, rows.type, rows.stride,
          (last_plane - rows.data) / size};
}

RowPlace AttentionExecutor::in_message(const Slice& slice, std::byte* data) const {
  const ArrayKind kind = array(slice.array).kind;
  return {data, types_.on_wire(kind), message_elements(kind, slice.heads.count, heads_),
          slice.heads.count * plane_dim(kind, 0, heads_)};
}

void AttentionExecutor::add_copies(const Slice& slice, const RowPlace& from, const RowPlace& to,
                                   bool add, std::vector<RowCopy>& copies) const {
  const ArrayKind kind = array(slice.array).kind;
  const auto width = [&](int64_t plane) {
    return slice.heads.count * plane_dim(kind, plane, heads_);
  };
  const int64_t planes = planes_of(kind);
  RowCopy copy{slice.rows, planes, width(0), from, to, types_.on_wire(kind), add};
  const bool even = width(planes - 1) == copy.width;
  if (!even) copy.planes = 1;
  copies.push_back(copy);
  if (even) return;
  copy.width = width(1);
  for (RowPlace* place : {&copy.from, &copy.to}) place->data += place->plane * size_of(place->type);
  copies.push_back(copy);
}

void AttentionExecutor::add_unpacking(const Slice& slice, std::byte* message,
                                      std::vector<RowCopy>& copies) {
  if (sends_shared_keys_once(array(slice.array).kind, slice.heads.count, heads_))
    add_shared_copies(slice, message, true, copies);
  else
    add_copies(slice, in_message(slice, message), in_array(slice), slice.add, copies);
}

void AttentionExecutor::add_shared_copies(const Slice& slice, std::byte* message, bool unpacks,
                                          std::vector<RowCopy>& copies) {
  const RowPlace lies = in_array(slice), travels = in_message(slice, message);
  const int64_t heads = slice.heads.count, dim = heads_.head_dim, shared = heads_.shared_key_dim,
                own_dim = heads_.own_key_dim(), values = heads * heads_.value_dim();
  const auto at = [](RowPlace place, int64_t element, int64_t plane) {
    place.data += element * size_of(place.type);
    place.plane = plane;
    return place;
  };
  const auto copy = [&](int64_t planes, int64_t width, const RowPlace& in_memory,
                        const RowPlace& in_message) {
    copies.push_back({slice.rows, planes, width, unpacks ? in_message : in_memory,
                      unpacks ? in_memory : in_message, travels.type, unpacks && slice.add});
  };
  copy(heads, own_dim, at(lies, 0, dim), at(travels, 0, own_dim));
  copy(1, values, at(lies, lies.plane, 0), at(travels, heads * own_dim, 0));
  const bool sum = array(slice.array).kind == ArrayKind::d_kv;
  copy(unpacks && !sum ? heads : 1, shared, at(lies, own_dim, dim),
       at(travels, heads * own_dim + values, 0));
  if (!unpacks || !sum || slice.add) return;
  if (zeros_.size() == 0) {
    zeros_ = Buffer<float>(shared, stream_.space());
    stream_.fill(zeros_.data(), std::byte{0}, zeros_.span().size_bytes());
  }
  const RowPlace zeros{reinterpret_cast<std::byte*>(zeros_.data()), DType::f32, 0, 0};
  copy(heads - 1, shared, at(lies, dim + own_dim, dim), zeros);
}

void AttentionExecutor::sum_shared_keys(const Slice& slice) {
  if (!sends_shared_keys_once(array(slice.array).kind, slice.heads.count, heads_)) return;
  MatrixView<float> keys = columns(slice.array, 0, slice.heads).as<float>();
  keys.data += slice.row * keys.stride;
  keys.rows = slice.rows;
  sum_over_heads(keys, heads_.head_dim, heads_.shared_key_dim, stream_);
}

void AttentionExecutor::wait_on_stream(WorkPtr work) {
  work->wait_on_stream();
  if (stream_.space() == MemorySpace::device) in_stream_.push_back(std::move(work));
}

void AttentionExecutor::complete(int id) {
  Pending& pending = pending_.at(id);
  wait_on_stream(std::move(pending.work));
  if (trace_ != nullptr && !pending.done) spans_[pending.span].end = stream_.mark();
}

void AttentionExecutor::unpack(int id) {
  Pending& pending = pending_.at(id);
  std::vector<RowCopy> copies;
  for (Received& received : pending.received) {
    clear_deferred(received.slice.array);
    add_unpacking(received.slice, received.data.data(), copies);
  }
  copy_rows(copies, stream_);
  // The buffers may be reused at once: the stream orders their next use after the copies.
  for (Buffer<float>& staging : pending.staging) workspace_.give_back(std::move(staging));
  pending_.erase(id);
}

void AttentionExecutor::progress() {
  if (stream_.recording()) return;  // recorded messages are not in progress
  for (auto& [id, pending] : pending_)
    if (!pending.done && pending.work->test()) {
      pending.done = true;
      if (trace_ != nullptr) spans_[pending.span].end = stream_.mark();
    }
}

void AttentionExecutor::clear(int index) {
  make_delta_before(index);
  // An array that used this storage before is dead: drops its deferred clear.
  std::erase_if(deferred_clears_,
                [&](int other) { return array(other).storage == array(index).storage; });
  deferred_clears_.insert(index);
  if (!kernel_.can_overwrite()) clear_deferred(index);
}

void AttentionExecutor::clear_deferred(int index) {
  if (deferred_clears_.erase(index) == 0) return;
  const auto data = data_[index];
  stream_.fill(data.data(), std::byte{0}, data.size());  // bytes of 0 are 0 in all types
  if (array(index).kind == ArrayKind::stats)
    fill(plane(index, 0).as<float>(), -infinity_of<float>, stream_);
}

bool AttentionExecutor::replaces_clears(std::initializer_list<int> arrays, HeadRange heads) {
  const bool overwrites = std::all_of(arrays.begin(), arrays.end(), [&](int index) {
    return deferred_clears_.contains(index) && array(index).heads == heads;
  });
  for (const int index : arrays)
    if (overwrites)
      deferred_clears_.erase(index);
    else
      clear_deferred(index);
  return overwrites;
}

void AttentionExecutor::compute(const step::Compute& s, Pass pass) {
  const HeadRange q_heads = query_heads_of(array(s.q).heads, s.kv_heads, heads_);
  const int64_t group = heads_.group();
  const int64_t kv_begin = std::max(s.kv_heads.begin, q_heads.begin / group);
  const int64_t kv_end = std::min(s.kv_heads.end(), ceil_div(q_heads.end(), group));
  const HeadRange kv_heads{kv_begin, kv_end - kv_begin};
  BlockInput input;
  input.heads = {.heads = q_heads.count,
                 .kv_heads = kv_heads.count,
                 .head_dim = heads_.head_dim,
                 .group = group,
                 .skew = q_heads.begin - kv_begin * group,
                 .scale = heads_.scale,
                 .v_head_dim = heads_.v_head_dim};
  input.q = columns(s.q, 0, q_heads);
  input.k = columns(s.kv, 0, kv_heads);
  input.v = columns(s.kv, 1, kv_heads);
  input.rectangles = s.rectangles;
  input.fixed_tiles = s.fixed_tiles;
  input.progress = [this] { progress(); };
  const MatrixView<float> lse = columns(s.stats, 0, q_heads).as<float>();
  if (pass == Pass::forward) {
    kernel_.forward(
        {input, columns(s.out, 0, q_heads), lse, replaces_clears({s.out, s.stats}, q_heads)});
    return;
  }
  BackwardBlock block{input};
  block.d_out = columns(s.d_out, 0, q_heads);
  block.lse = lse;
  block.delta = columns(s.stats, 1, q_heads).as<float>();
  if (delta_ && delta_->stats == s.stats && delta_->d_out == s.d_out)
    block.out = columns(delta_->out, 0, q_heads);
  if (delta_is_deferred_) block.make_delta = [this] { make_delta(); };
  if (s.d_q >= 0) {
    block.d_q = columns(s.d_q, 0, q_heads);
    block.overwrite_d_q = replaces_clears({s.d_q}, q_heads);
  }
  if (s.d_kv >= 0) {
    block.overwrite_d_kv = replaces_clears({s.d_kv}, kv_heads);
    block.d_k = columns(s.d_kv, 0, kv_heads).as<float>();
    block.d_v = columns(s.d_kv, 1, kv_heads).as<float>();
  }
  kernel_.backward(block);
}

void AttentionExecutor::begin_sinks(Pass pass) {
  const bool gradients = pass == Pass::backward;
  if (gradients) d_sinks_.assign(sinks_.size(), 0.0);
  if (sinks_.empty()) return;
  if (gradients) {
    if (sums_.size() != std::ssize(sinks_))
      sums_ = Buffer<double>(std::ssize(sinks_), stream_.space());
    stream_.fill(sums_.data(), std::byte{0}, sums_.span().size_bytes());
  }
  if (stream_.space() == MemorySpace::host) return;
  if (device_sinks_.size() != std::ssize(sinks_))
    device_sinks_ = Buffer<float>(std::ssize(sinks_), stream_.space());
  stream_.copy(device_sinks_.data(), sinks_.data(), sinks_.size_bytes());
}

const float* AttentionExecutor::sinks_of(const PlanArray& stats) const {
  const bool here = stream_.space() == MemorySpace::host;
  return (here ? sinks_.data() : device_sinks_.data()) + stats.heads.begin;
}

void AttentionExecutor::merge(const step::Merge& s) {
  std::vector<step::Merge::Partial> all = s.partials;
  all.push_back({s.out, s.stats});
  for (const auto& [out, stats] : all)
    for (const int index : {out, stats}) clear_deferred(index);
  const MatrixView<float> lse = plane(s.stats, 0).as<float>();
  const MatrixRef first = plane(s.stats, 1);
  copy_matrix(plane(s.stats, 0), first, stream_);
  for (const auto& [out, stats] : s.partials)
    merge_statistics(lse, plane(stats, 0).as<float>(), stream_);
  const MatrixRef sum = plane(s.out, 0);
  rescale_output({sum, lse}, first.as<float>(), stream_);
  for (const auto& [out, stats] : s.partials)
    add_output({sum, lse}, {plane(out, 0), plane(stats, 0).as<float>()}, stream_);
}

void AttentionExecutor::finish(const step::Finish& s) {
  if (sinks_.empty()) return;
  take_in_sinks(plane(s.out, 0), plane(s.stats, 0).as<float>(), sinks_of(array(s.stats)), stream_);
}

void AttentionExecutor::delta(const step::Delta& s) {
  make_delta();
  delta_ = s;
  delta_is_deferred_ = true;
  if (!kernel_.asks_for_delta()) make_delta();
}

void AttentionExecutor::make_delta() {
  if (!std::exchange(delta_is_deferred_, false)) return;
  row_deltas(plane(delta_->out, 0), plane(delta_->d_out, 0), plane(delta_->stats, 1).as<float>(),
             stream_);
}

void AttentionExecutor::make_delta_before(int index) {
  if (!delta_is_deferred_) return;
  for (const int part : {delta_->out, delta_->d_out, delta_->stats})
    if (array(part).storage == array(index).storage) return make_delta();
}

void AttentionExecutor::sink_gradient(const step::SinkGradient& s) {
  if (sinks_.empty()) return;
  make_delta();
  const PlanArray& stats = array(s.stats);
  sink_gradients_.add(plane(s.stats, 0).as<float>(), plane(s.stats, 1).as<float>(), sinks_of(stats),
                      sums_.data() + stats.heads.begin, stream_);
  if (s.complete) return;
  wait_on_stream(group_.all_reduce(sums_.data(), sums_.size(), DType::f64, ReduceOp::sum, stream_,
                                   "gradient of the sinks"));
}

void AttentionExecutor::add_spans(Pass pass) {
  for (Span& span : spans_)
    trace_->add({TraceLane::communication, span.exchange->what, span.begin->seconds(),
                 span.end->seconds(), SpanKind::message, span.step, name_of(pass),
                 std::move(span.sent), std::move(span.received)});
  spans_.clear();
}

void AttentionExecutor::record_runs(bool on) {
  records_ = on;
  recordings_.clear();
  windows_.clear();
  if (on) register_gathered_arrays();
}

void AttentionExecutor::register_gathered_arrays() {
  // Largest range that any all-gather uses, by group and storage.
  std::map<std::pair<std::vector<int>, int>, std::span<std::byte>> used;
  for (const Pass pass : {Pass::forward, Pass::backward})
    for (const Step& s : plan_.steps(pass)) {
      const auto* gather = std::get_if<step::Exchange>(&s);
      if (gather == nullptr || gather->transport != Transport::all_gather) continue;
      const Slice &sent = gather->sends.front().slices.front(),
                  &received = gather->recvs.front().slices.front();
      const bool copied = copies_of(*gather, plan_, heads_, types_).sent > 0;
      if (copied || array(sent.array).storage == array(received.array).storage) continue;
      for (const int index : {sent.array, received.array}) {
        const auto memory = data_[index];
        auto& most = used[{gather->group, array(index).storage}];
        if (sent.row == 0 && memory.size() > most.size()) most = memory;
      }
    }
  for (const auto& [place, memory] : used)
    windows_.push_back(group_.subgroup(place.first).register_window(memory));
  // Either all all-gathers use registered arrays, or none does.
  if (std::ranges::find(windows_, nullptr) != windows_.end()) windows_.clear();
}

AttentionExecutor::Submission AttentionExecutor::submit(Pass pass, Execute what) {
  delta_.reset();
  delta_is_deferred_ = false;
  deferred_clears_.clear();
  Submission submission{std::make_shared<Walker>(*this, pass, what)};
  for (const Step& s : plan_.steps(pass)) submission.walker->walk(s);
  submission.walker->finish();
  if (pass == Pass::backward) sum_shared_keys(whole(own(ArrayKind::d_kv)));
  submission.end = stream_.mark();
  GYRE_CHECK(pending_.empty(), "{} exchanges of the schedule were never waited for",
             pending_.size());
  submission.communication = std::exchange(in_stream_, {});
  return submission;
}

ExecutionTimes AttentionExecutor::finish(Pass pass, const Submission& submission) {
  for (const WorkPtr& work : submission.communication) work->wait();
  if (pass == Pass::backward)
    stream_.copy(d_sinks_.data(), sums_.data(), d_sinks_.size() * sizeof(double));
  stream_.synchronize();
  add_spans(pass);
  return submission.walker->times(*submission.end, trace_);
}

ExecutionTimes AttentionExecutor::run_recorded(Pass pass, Execute what) {
  Recording& recording = recordings_[{pass, what}];
  if (recording.releases != cuda_releases()) {
    recording.steps.reset();  // destroyed before the marks that they refer to
    recording = {};
    const ExecutionTimes times = finish(pass, submit(pass, what));
    recording.releases = cuda_releases();
    return times;
  }
  if (recording.steps == nullptr) {
    const Traffic before = group_.traffic();
    recording.steps = stream_.record([&] { recording.submission = submit(pass, what); });
    GYRE_CHECK(recording.steps != nullptr, "steps to be recorded on the host");
    const Traffic after = group_.traffic();
    recording.traffic = {after.bytes_sent - before.bytes_sent, after.messages - before.messages};
  } else {
    group_.count_again(recording.traffic);
  }
  recording.steps->submit();
  replayed_ = recording.steps->operations();
  return finish(pass, recording.submission);
}

AttentionExecutor::Submission AttentionExecutor::start(Pass pass) {
  begin_sinks(pass);
  replayed_ = 0;
  return submit(pass, Execute::all);
}

ExecutionTimes AttentionExecutor::run(Pass pass, Execute what) {
  const ProfileRange range(pass == Pass::forward ? "attention forward" : "attention backward");
  begin_sinks(pass);
  replayed_ = 0;
  if (records_ && trace_ == nullptr) return run_recorded(pass, what);
  return finish(pass, submit(pass, what));
}

}  // namespace gyre
