#pragma once
// A communicator that verifies messages: the sender's checksum follows every message.

#include <memory>

#include "comm/communicator.hpp"

namespace gyre {

/// Checks the messages of another communicator, in host memory. wait(), or the test() that finds
/// the operation complete, throws a runtime error that names the step and the sender when the
/// received data differ from the data sent:
///     exchange, all-gather, all-to-all   the sender's checksum (64 bits, XXH3) of each message
///                                        follows it; broadcast sends one checksum of its data
///     all-reduce, reduce-scatter         run twice; the results must have the same bits
/// traffic() counts neither checksums nor second reductions.
class CheckedCommunicator final : public Communicator {
 public:
  explicit CheckedCommunicator(std::unique_ptr<Communicator> transport);

  /// Turns the checks on (the initial state) or off; off, messages pass at full speed. All ranks
  /// switch between the same operations, while none is in flight. Also applies to communicators
  /// made by split().
  void check_messages(bool on) { *checking_ = on; }

  int rank() const override { return transport_->rank(); }
  int size() const override { return transport_->size(); }
  MemorySpace space() const override { return transport_->space(); }
  std::string_view backend() const override { return transport_->backend(); }
  std::unique_ptr<Communicator> split(int color) override;
  void sleep_between_polls(double seconds) override { transport_->sleep_between_polls(seconds); }
  double next_event() const override { return transport_->next_event(); }
  const Communicator& transport() const override { return transport_->transport(); }

 protected:
  WorkPtr do_exchange(std::span<const SendSlice> sends, std::span<const RecvSlice> recvs, Stream&,
                      std::string_view what) override;
  WorkPtr do_collective(const Collective& call, Stream&, std::string_view what) override;

 private:
  CheckedCommunicator(std::unique_ptr<Communicator> transport, std::shared_ptr<bool> checking);

  std::unique_ptr<Communicator> transport_;
  std::shared_ptr<bool> checking_;
};

}  // namespace gyre
