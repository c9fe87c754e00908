#pragma once
// Writes the operations of one rank, block by block. Plans of attention (program.cpp) and of states
// (recurrence_program.cpp) are compiled with it.

#include <array>
#include <string>
#include <vector>

#include "predict/program.hpp"

namespace gyre {

class OpWriter {
 protected:
  OpWriter(const Programs& programs, int rank, const std::string& schedule)
      : p_(programs), rank_(rank), schedule_(schedule) {}

  /// An exchange in flight.
  struct Open {
    int id = 0, step = 0;
    int16_t slot = 0;
    int64_t unpacked = 0;  ///< bytes that unpacking and adding read and write
    /// [tier] seconds of transfers not yet overlapped by a kernel.
    std::array<double, max_tiers> sending = {}, receiving = {};
  };

  /// Ends a step of the plan, and behind a Wait its block.
  void end_step(bool is_wait);
  /// Ends the program. Throws a runtime error if an exchange is under way.
  CompiledRank end();

  Open new_exchange(int id) const;
  void start(const Open& open) { open_.push_back(open); }
  /// Adds a message to another rank, which is the step's message number `index`.
  void send(int peer, int64_t bytes, int index, Open& open);
  void receive(int peer, int64_t bytes, Open& open);
  /// Adds a library's collective of `ranks` neighbours from `first` on, in which each sends `bytes`
  /// to every other.
  void join(int first, int ranks, int64_t bytes, Open& open);
  /// Adds the wait for an exchange and returns it.
  Open wait(int id);

  /// Adds a kernel call. Transfers in flight slow it down.
  void compute(double seconds, double extrapolated = 0);
  /// Moves bytes in memory, read and written together.
  void pass(int64_t moved) { move(SpanKind::pass, moved); }
  void copy(int64_t moved) { move(SpanKind::copy, moved); }
  void spend(SpanKind what, double seconds, double slowed = 0);

  /// Position in the plan, for error messages.
  std::string place() const;
  const MachineModel& machine() const { return p_.machine_; }

  const Programs& p_;

 private:
  void move(SpanKind what, int64_t moved) {
    spend(what, static_cast<double>(moved) / machine().copy_bytes_per_s);
  }
  Op& message(OpKind kind, int peer, int64_t bytes, const Open& open);
  double link_seconds(const Op& op) const {
    return machine().links.empty() ? 0 : machine().links[op.tier].seconds(op.bytes);
  }
  Op& add(Op op) {
    op.step = step_ - block_begin_;
    block_.ops.push_back(op);
    return block_.ops.back();
  }
  void end_block();

  int rank_;
  const std::string& schedule_;
  CompiledRank compiled_;
  BlockTable::Block block_;
  int step_ = 0, block_begin_ = 0;
  std::vector<Open> open_;
};

}  // namespace gyre
