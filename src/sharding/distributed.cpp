#include "sharding/distributed.hpp"

#include <algorithm>

#include "comm/agree.hpp"
#include "core/error.hpp"
#include "sharding/transfer.hpp"

namespace gyre {
namespace {

void check_group(const Layout& layout, const Communicator& comm) {
  if (layout.cp() != comm.size())
    throw_usage("layout {} is for {} ranks, but the group has {}", layout.name, layout.cp(),
                comm.size());
}

void check_rows(int64_t batch, int64_t row) {
  if (batch < 0) throw_usage("a batch of {} rows; there are at least 0", batch);
  if (row < 1) throw_usage("{} elements a slot; there is at least 1", row);
}

/// A slot whose value moves between ranks; sender and receiver sort by its stream slot.
struct Crossing {
  int64_t stream_slot;
  int32_t local;
};

std::vector<SlotMoves::Message> messages(std::vector<std::vector<Crossing>>& by_peer) {
  std::vector<SlotMoves::Message> result;
  for (size_t peer = 0; peer < by_peer.size(); ++peer) {
    std::vector<Crossing>& crossings = by_peer[peer];
    if (crossings.empty()) continue;
    // A rank may hold its runs in any order.
    std::sort(crossings.begin(), crossings.end(),
              [](const Crossing& a, const Crossing& b) { return a.stream_slot < b.stream_slot; });
    SlotMoves::Message& message = result.emplace_back();
    message.peer = static_cast<int>(peer);
    for (const Crossing& crossing : crossings) message.slots.push_back(crossing.local);
  }
  return result;
}

void add_move(std::vector<SlotMoves::Move>& moves, int32_t from, int32_t to) {
  if (!moves.empty() && moves.back().from + moves.back().length == from &&
      moves.back().to + moves.back().length == to)
    ++moves.back().length;
  else
    moves.push_back({from, to, 1});
}

}  // namespace

namespace detail {

void check_gather(const Layout& layout, Communicator& comm, int64_t elements, int64_t batch,
                  int64_t row) {
  agree_on_arguments(
      comm, "gathering a stream",
      [&] {
        check_group(layout, comm);
        check_rows(batch, row);
        if (elements != batch * layout.slots_of_rank() * row)
          throw_usage(
              "gathering a stream: {} local elements, but {} rows x {} slots x {} elements are {}",
              elements, batch, layout.slots_of_rank(), row, batch * layout.slots_of_rank() * row);
      },
      {{"the number of rows", batch},
       {"the number of elements a slot", row},
       {"the number of slots a rank", layout.slots_of_rank()}});
}

void gather_bytes(const Layout& layout, Communicator& comm, std::span<const std::byte> local,
                  int64_t batch, std::span<std::byte> stream, int64_t row_bytes) {
  std::vector<std::byte> blocks(local.size() * comm.size());
  HostStream host;
  comm.all_gather(local, blocks, host, "gathering a stream")->wait();
  const size_t block = layout.slots_of_rank() * row_bytes;
  const size_t row = layout.stream_slots * row_bytes;
  // Blocks are [cp, batch, slots, row]: consecutive shards of one batch row are a rank block apart.
  const std::span<const std::byte> all(blocks);
  const size_t reach = blocks.size() - local.size() + block;
  for (int64_t b = 0; b < batch; ++b)
    unshard_all_bytes(layout, all.subspan(b * block, reach), std::ssize(local),
                      stream.subspan(b * row, row), row_bytes);
}

}  // namespace detail

template <class T>
std::vector<T> gather_stream_backward(const Layout& layout, Communicator& comm,
                                      std::span<const T> grad_stream, int64_t row,
                                      GatherGradient convention) {
  agree_on_arguments(
      comm, "gradient of a gathered stream",
      [&] {
        check_group(layout, comm);
        check_rows(1, row);
        if (std::ssize(grad_stream) != layout.stream_slots * row)
          throw_usage("gradient of a gathered stream: {} elements, but {} slots x {} are {}",
                      grad_stream.size(), layout.stream_slots, row, layout.stream_slots * row);
      },
      {{"the number of elements a slot", row},
       {"the number of slots a rank", layout.slots_of_rank()},
       {"the gradient convention", static_cast<int64_t>(convention)}});
  const size_t count = layout.slots_of_rank() * row;
  std::vector<T> grad(count, T{0});
  if (convention == GatherGradient::split)
    shard_rows<T>(layout, comm.rank(), grad_stream, grad, row);
  if (convention == GatherGradient::sum) {
    std::vector<T> blocks(count * comm.size());
    shard_all_rows<T>(layout, grad_stream, blocks, row);
    HostStream host;
    comm.reduce_scatter(blocks.data(), grad.data(), count, dtype_of<T>, ReduceOp::sum, host,
                        "gradient of a gathered stream")
        ->wait();
  }
  return grad;
}

SlotMoves plan_shift_left(const Layout& layout, std::span<const int32_t> bounds, int rank) {
  check_boundaries(layout, bounds);
  if (rank < 0 || rank >= layout.cp())
    throw_usage("rank {} of a layout of {} ranks", rank, layout.cp());
  std::vector<bool> begins(layout.stream_slots + 1, false);
  for (const int32_t bound : bounds) begins[bound] = true;
  const std::vector<Owner> owners = slot_owners(layout);
  const std::vector<int32_t> index = shard_index(layout, rank);
  std::vector<std::vector<Crossing>> sends(layout.cp()), recvs = sends;
  SlotMoves plan;
  plan.held = plan.slots = std::ssize(index);
  for (size_t t = 0; t < index.size(); ++t) {
    const auto local = static_cast<int32_t>(t);
    const size_t slot = index[t];
    const bool in_stream = index[t] < layout.stream_slots;
    if (in_stream && !begins[slot])
      if (const Owner before = owners[slot - 1]; before.rank != rank)
        sends[before.rank].push_back({index[t], local});
    if (!in_stream || begins[slot + 1]) {
      plan.filled.push_back(local);
      continue;
    }
    const Owner next = owners[slot + 1];
    if (next.rank == rank)
      add_move(plan.moves, next.local, local);
    else
      recvs[next.rank].push_back({index[t] + 1, local});
  }
  plan.sends = messages(sends);
  plan.recvs = messages(recvs);
  return plan;
}

namespace {

/// Moves local [held, row] to out [slots, row].
template <class T>
void move_slots(const SlotMoves& plan, Communicator& comm, std::span<const T> local,
                std::span<T> out, int64_t row, T fill, const char* what) {
  GYRE_CHECK(std::ssize(local) == plan.held * row && std::ssize(out) == plan.slots * row,
             "{} of {} values to {} by a plan of {} slots to {}", what, local.size(), out.size(),
             plan.held, plan.slots);
  const auto append = [&](std::vector<T>& values, int32_t slot) {
    const auto begin = local.begin() + slot * row;
    values.insert(values.end(), begin, begin + row);
  };
  std::vector<std::vector<T>> sent, received;
  std::vector<SendSlice> sends;
  std::vector<RecvSlice> recvs;
  for (const SlotMoves::Message& message : plan.sends) {
    std::vector<T>& values = sent.emplace_back();
    for (const int32_t slot : message.slots) append(values, slot);
    sends.push_back({message.peer, bytes_of(std::span<const T>(values))});
  }
  for (const SlotMoves::Message& message : plan.recvs) {
    std::vector<T>& values = received.emplace_back(message.slots.size() * row);
    recvs.push_back({message.peer, writable_bytes_of(std::span<T>(values))});
  }
  HostStream host;
  const WorkPtr work = comm.exchange(sends, recvs, host, what);
  for (const SlotMoves::Move& move : plan.moves)
    std::copy_n(local.begin() + move.from * row, move.length * row, out.begin() + move.to * row);
  for (const int32_t slot : plan.filled) std::fill_n(out.begin() + slot * row, row, fill);
  work->wait();
  for (size_t m = 0; m < plan.recvs.size(); ++m)
    for (size_t i = 0; i < plan.recvs[m].slots.size(); ++i)
      std::copy_n(received[m].begin() + static_cast<int64_t>(i) * row, row,
                  out.begin() + plan.recvs[m].slots[i] * row);
}

template <class T>
std::vector<T> moved(const SlotMoves& plan, Communicator& comm, std::span<const T> local,
                     int64_t row, T fill, const char* what) {
  std::vector<T> out(plan.slots * row);
  move_slots<T>(plan, comm, local, out, row, fill, what);
  return out;
}

}  // namespace

std::vector<std::vector<int32_t>> halos_of(const Layout& layout, int rank, int64_t rows) {
  const std::vector<int32_t> index = shard_index(layout, rank);
  std::vector<std::vector<int32_t>> halos;
  for (const Fragment& fragment : layout.shard(rank).fragments) {
    std::vector<int32_t>& halo = halos.emplace_back();
    const int32_t first = index[fragment.local_begin.value()];
    for (int64_t i = std::min(rows, fragment.start.value()); i > 0; --i)
      halo.push_back(first - static_cast<int32_t>(i));
  }
  return halos;
}

SlotMoves plan_relayout(const Layout& from, const Layout& to, int rank, int64_t halo) {
  if (from.stream_slots != to.stream_slots || from.cp() != to.cp())
    throw_usage(
        "layouts must have equal slots and ranks: {} has {} slots over {} ranks, {} has {} over {}",
        from.name, from.stream_slots, from.cp(), to.name, to.stream_slots, to.cp());
  if (rank < 0 || rank >= from.cp())
    throw_usage("rank {} of a layout of {} ranks", rank, from.cp());
  const std::vector<Owner> before = slot_owners(from);
  SlotMoves plan;
  plan.held = from.slots_of_rank();
  std::vector<std::vector<Crossing>> sends(from.cp()), recvs = sends;
  for (int peer = 0; peer < to.cp(); ++peer) {
    std::vector<int32_t> wanted = shard_index(to, peer);
    if (halo > 0)
      for (const std::vector<int32_t>& rows : halos_of(to, peer, halo))
        wanted.insert(wanted.end(), rows.begin(), rows.end());
    if (peer == rank) plan.slots = std::ssize(wanted);
    for (size_t t = 0; t < wanted.size(); ++t) {
      const int32_t slot = wanted[t], now = static_cast<int32_t>(t);
      const bool is_padding = slot >= from.stream_slots;
      if (is_padding && peer == rank) plan.filled.push_back(now);
      if (is_padding) continue;
      const Owner old = before[slot];
      if (old.rank == rank && peer == rank)
        add_move(plan.moves, old.local, now);
      else if (old.rank == rank)
        sends[peer].push_back({slot, old.local});
      else if (peer == rank)
        recvs[old.rank].push_back({slot, now});
    }
  }
  plan.sends = messages(sends);
  plan.recvs = messages(recvs);
  return plan;
}

template <class T>
std::vector<T> relayout(const Layout& from, const Layout& to, Communicator& comm,
                        std::span<const T> local, int64_t row, T fill) {
  SlotMoves plan;
  agree_on_arguments(
      comm, "change of layout",
      [&] {
        check_group(from, comm);
        check_rows(1, row);
        plan = plan_relayout(from, to, comm.rank());
        if (std::ssize(local) != plan.held * row)
          throw_usage("change of layout: {} local elements, but {} slots x {} elements are {}",
                      local.size(), plan.held, row, plan.held * row);
      },
      {{"the number of elements a slot", row}});
  return relayout(plan, comm, local, row, fill);
}

template <class T>
std::vector<T> relayout(const SlotMoves& plan, Communicator& comm, std::span<const T> local,
                        int64_t row, T fill) {
  return moved(plan, comm, local, row, fill, "change of layout");
}

void relayout_rows(const SlotMoves& plan, Communicator& comm, std::span<const std::byte> local,
                   std::span<std::byte> out, int64_t row_bytes) {
  move_slots(plan, comm, local, out, row_bytes, std::byte{0}, "change of layout");
}

template <class T>
std::vector<T> shift_left_sharded(const SlotMoves& plan, Communicator& comm,
                                  std::span<const T> local, T fill) {
  return moved(plan, comm, local, 1, fill, "next-token shift");
}

template <class T>
std::vector<T> shift_left_sharded(const Layout& layout, std::span<const int32_t> bounds,
                                  Communicator& comm, std::span<const T> local, T fill) {
  SlotMoves plan;
  run_agreed(comm, "next-token shift", [&] {
    check_group(layout, comm);
    plan = plan_shift_left(layout, bounds, comm.rank());
    if (std::ssize(local) != plan.slots)
      throw_usage("next-token shift: {} local values, but the rank has {} slots", local.size(),
                  plan.slots);
  });
  return shift_left_sharded(plan, comm, local, fill);
}

template std::vector<float> gather_stream_backward(const Layout&, Communicator&,
                                                   std::span<const float>, int64_t, GatherGradient);
template std::vector<double> gather_stream_backward(const Layout&, Communicator&,
                                                    std::span<const double>, int64_t,
                                                    GatherGradient);
template std::vector<int32_t> relayout(const Layout&, const Layout&, Communicator&,
                                       std::span<const int32_t>, int64_t, int32_t);
template std::vector<int32_t> relayout(const SlotMoves&, Communicator&, std::span<const int32_t>,
                                       int64_t, int32_t);
template std::vector<int64_t> relayout(const Layout&, const Layout&, Communicator&,
                                       std::span<const int64_t>, int64_t, int64_t);
template std::vector<int64_t> relayout(const SlotMoves&, Communicator&, std::span<const int64_t>,
                                       int64_t, int64_t);
template std::vector<float> relayout(const Layout&, const Layout&, Communicator&,
                                     std::span<const float>, int64_t, float);
template std::vector<float> relayout(const SlotMoves&, Communicator&, std::span<const float>,
                                     int64_t, float);
template std::vector<double> relayout(const Layout&, const Layout&, Communicator&,
                                      std::span<const double>, int64_t, double);
template std::vector<double> relayout(const SlotMoves&, Communicator&, std::span<const double>,
                                      int64_t, double);
template std::vector<int32_t> shift_left_sharded(const SlotMoves&, Communicator&,
                                                 std::span<const int32_t>, int32_t);
template std::vector<int64_t> shift_left_sharded(const SlotMoves&, Communicator&,
                                                 std::span<const int64_t>, int64_t);
template std::vector<int32_t> shift_left_sharded(const Layout&, std::span<const int32_t>,
                                                 Communicator&, std::span<const int32_t>, int32_t);
template std::vector<int64_t> shift_left_sharded(const Layout&, std::span<const int32_t>,
                                                 Communicator&, std::span<const int64_t>, int64_t);

}  // namespace gyre
