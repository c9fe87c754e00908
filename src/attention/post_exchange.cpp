// Posts an exchange for the executor: the copies that must precede it, then the messages.

#include <algorithm>

#include "attention/execute.hpp"

namespace gyre {

void AttentionExecutor::add_local_copies(const step::Exchange& s, std::vector<RowCopy>& copies) {
  const auto slices_of = [&](const std::vector<Message>& messages) {
    std::vector<Slice> slices;
    for (const Message& m : messages)
      if (m.peer == plan_.rank) slices.insert(slices.end(), m.slices.begin(), m.slices.end());
    return slices;
  };
  const std::vector<Slice> sends = slices_of(s.sends), recvs = slices_of(s.recvs);
  GYRE_CHECK(sends.size() == recvs.size(), "{}: {} local slices to {}", s.what, sends.size(),
             recvs.size());
  for (size_t i = 0; i < sends.size(); ++i)  // rounded as in a message
    add_copies(sends[i], in_array(sends[i]), in_array(recvs[i]), recvs[i].add, copies);
}

class AttentionExecutor::Staging {
 public:
  Staging(const AttentionExecutor& executor, const Message& message, bool received,
          Pending& pending)
      : executor_(executor), received_(received) {
    int64_t bytes = 0;
    for (const Slice& slice : message.slices)
      if (takes(slice)) bytes += reserved(slice);
    if (bytes == 0) return;
    pending.staging.push_back(executor.workspace_.take_staging(bytes));
    left_ = std::as_writable_bytes(pending.staging.back().span());
  }

  bool takes(const Slice& slice) const {
    return !travels_as_it_lies(executor_.array(slice.array), slice, executor_.heads_,
                               executor_.types_) ||
           (received_ && slice.add);
  }
  std::span<std::byte> piece(const Slice& slice) {
    const size_t reserved_bytes = reserved(slice);
    const std::span<std::byte> mine = left_.first(bytes(slice));
    left_ = left_.subspan(reserved_bytes);
    return mine;
  }

 private:
  int64_t bytes(const Slice& slice) const {
    return wire_bytes(executor_.array(slice.array).kind, slice, executor_.heads_, executor_.types_);
  }
  /// Every piece is padded to whole floats.
  int64_t reserved(const Slice& slice) const { return round_up(bytes(slice), sizeof(float)); }

  const AttentionExecutor& executor_;
  bool received_;
  std::span<std::byte> left_;
};

AttentionExecutor::Posting AttentionExecutor::messages_of(const step::Exchange& s,
                                                          Pending& pending) {
  Posting posting;
  for (const Message& m : s.sends) {
    if (m.peer == plan_.rank) continue;
    Staging staging(*this, m, false, pending);
    for (const Slice& slice : m.slices)
      posting.sends.push_back({m.peer, staging.takes(slice)
                                           ? pack(slice, staging.piece(slice), posting.copies)
                                           : place(slice)});
  }
  for (const Message& m : s.recvs) {
    if (m.peer == plan_.rank) continue;
    Staging staging(*this, m, true, pending);
    for (const Slice& slice : m.slices) {
      if (!staging.takes(slice)) {
        posting.recvs.push_back({m.peer, place(slice)});
        continue;
      }
      pending.received.push_back({slice, staging.piece(slice)});
      posting.recvs.push_back({m.peer, pending.received.back().data});
    }
  }
  return posting;
}

AttentionExecutor::Posting AttentionExecutor::library_parts_of(const step::Exchange& s,
                                                               Pending& pending) {
  const MessageCopies copied = copies_of(s, plan_, heads_, types_);
  std::span<std::byte> out = stage(copied.sent, pending), in = stage(copied.received, pending);
  const auto next = [&](std::span<std::byte>& left, const Slice& slice) {
    const auto bytes = wire_bytes(array(slice.array).kind, slice, heads_, types_);
    if (bytes % sizeof(float) != 0)
      throw_usage("{}: a part of {} bytes; the library's {} takes whole numbers of {} bytes",
                  s.what, bytes, name_of(s.transport), sizeof(float));
    const std::span<std::byte> piece = left.first(bytes);
    left = left.subspan(piece.size());
    return piece;
  };
  Posting posting;
  if (s.transport == Transport::all_to_all) {
    const auto slices_of = [&](const std::vector<Message>& messages, int peer) {
      const auto found = std::ranges::find(messages, peer, &Message::peer);
      return peer == plan_.rank || found == messages.end() ? std::span<const Slice>()
                                                           : std::span(found->slices);
    };
    for (const int peer : s.group) {
      const std::byte* const from = out.data();
      for (const Slice& slice : slices_of(s.sends, peer))
        pack(slice, next(out, slice), posting.copies);
      posting.sends.push_back({peer, {from, out.data()}});
      std::byte* const to = in.data();
      for (const Slice& slice : slices_of(s.recvs, peer))
        pending.received.push_back({slice, next(in, slice)});
      posting.recvs.push_back({peer, {to, in.data()}});
    }
    return posting;
  }
  const Slice &sent = s.sends.front().slices.front(), &received = s.recvs.front().slices.front();
  const bool gathers = s.transport == Transport::all_gather;
  const Slice from = gathers ? sent : whole(sent.array);
  posting.sends.push_back(
      {plan_.rank, copied.sent > 0 ? pack(from, next(out, from), posting.copies) : place(from)});
  const Slice to = gathers ? whole(received.array) : received;
  if (copied.received > 0) {
    pending.received.push_back({to, next(in, to)});
    posting.recvs.push_back({plan_.rank, pending.received.back().data});
  } else {
    posting.recvs.push_back({plan_.rank, place(to)});
  }
  return posting;
}

std::span<std::byte> AttentionExecutor::stage(int64_t bytes, Pending& pending) {
  if (bytes == 0) return {};
  pending.staging.push_back(workspace_.take_staging(bytes));
  return std::as_writable_bytes(pending.staging.back().span()).first(bytes);
}

std::span<const std::byte> AttentionExecutor::pack(const Slice& slice, std::span<std::byte> to,
                                                   std::vector<RowCopy>& copies) {
  if (!sends_shared_keys_once(array(slice.array).kind, slice.heads.count, heads_)) {
    add_copies(slice, in_array(slice), in_message(slice, to.data()), false, copies);
    return to;
  }
  if (array(slice.array).kind == ArrayKind::d_kv) sum_shared_keys(slice);
  add_shared_copies(slice, to.data(), false, copies);
  return to;
}

WorkPtr AttentionExecutor::submit(const step::Exchange& s, const Posting& posting) {
  const std::vector<SendSlice>& sends = posting.sends;
  const std::vector<RecvSlice>& recvs = posting.recvs;
  if (s.transport == Transport::messages) return group_.exchange(sends, recvs, stream_, s.what);
  Communicator& group = group_.subgroup(s.group);
  const auto sizes = [](const auto& parts) {
    std::vector<int64_t> bytes;
    for (const auto& part : parts) bytes.push_back(std::ssize(part.data));
    return bytes;
  };
  // The parts are consecutive in memory.
  const std::span from(sends.front().data.data(),
                       sends.back().data.data() + sends.back().data.size());
  const std::span to(recvs.front().data.data(),
                     recvs.back().data.data() + recvs.back().data.size());
  if (s.transport == Transport::all_gather) return group.all_gather(from, to, stream_, s.what);
  if (s.transport == Transport::all_to_all)
    return group.all_to_all_v(from, sizes(sends), to, sizes(recvs), stream_, s.what);
  const DType type = types_.on_wire(array(s.sends.front().slices.front().array).kind);
  return group.reduce_scatter(from.data(), to.data(), std::ssize(to) / size_of(type), type,
                              ReduceOp::sum, stream_, s.what);
}

void AttentionExecutor::post(const step::Exchange& s, int step) {
  Pending pending{&s};
  Posting posting =
      s.transport == Transport::messages ? messages_of(s, pending) : library_parts_of(s, pending);
  add_local_copies(s, posting.copies);
  copy_rows(posting.copies, stream_);
  if (trace_ != nullptr) {
    pending.span = spans_.size();
    spans_.push_back({&s, step, traced(s.sends), traced(s.recvs), stream_.mark()});
  }
  pending.work = submit(s, posting);
  pending_[s.id] = std::move(pending);
}

std::vector<TraceMessage> AttentionExecutor::traced(const std::vector<Message>& messages) const {
  std::vector<TraceMessage> traced;
  for (const Message& m : messages) {
    if (m.peer == plan_.rank) continue;
    TraceMessage& message = traced.emplace_back(TraceMessage{m.peer});
    for (const Slice& slice : m.slices)
      message.bytes += wire_bytes(array(slice.array).kind, slice, heads_, types_);
  }
  return traced;
}

}  // namespace gyre
