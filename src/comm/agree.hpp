#pragma once
// Agreement on errors: an error on one rank ends all ranks with the same exit code and message.

#include <functional>
#include <initializer_list>

#include "comm/communicator.hpp"
#include "core/error.hpp"

namespace gyre {

/// Throws the error that all ranks of `comm` throw here: an AgreedError if `comm` holds all ranks
/// of the run, otherwise an Error, because the ranks outside `comm` do not know of it.
[[noreturn]] void throw_to_all(const Communicator& comm, ExitCode code, const std::string& message);

/// Runs `local` (no communication inside) on every rank. If any rank throws, all ranks throw the
/// error of the lowest such rank (throw_to_all). Collective; `what` names the step. Unless all
/// ranks fail, the message names the rank.
void run_agreed(Communicator& comm, std::string_view what, const std::function<void()>& local);

/// Runs `work` inside a `local` of run_agreed. In `work`, all ranks of `comm` wait for each other
/// by other means than `comm`, such as collective calls of HDF5. An exception of `work` ends the
/// run, because the other ranks wait for this one; in a group of one rank it propagates.
void run_in_step(const Communicator& comm, const std::function<void()>& work);

/// Runs `work` on rank 0 alone; if it throws, all ranks throw its error (throw_to_all).
/// Collective.
void run_on_root(Communicator& comm, std::string_view what, const std::function<void()>& work);

/// Argument that must be the same on all ranks of a group.
struct SameOnAllRanks {
  std::string_view name;
  int64_t value;
};

/// Runs `check` (no communication inside) on every rank and compares `arguments` over the ranks. If
/// a check throws or an argument differs, all ranks throw the same error (throw_to_all); a
/// difference is a usage error that names both values. Collective: two small all-gathers.
/// If `together` is given, all its ranks must call this at the same time, each in a group like
/// `comm`, and all of them throw if one group differs. Arguments that arrive with other bits than
/// were sent are a runtime error of the rank that receives them.
void agree_on_arguments(Communicator& comm, std::string_view what,
                        const std::function<void()>& check,
                        std::initializer_list<SameOnAllRanks> arguments,
                        Communicator* together = nullptr);

/// Returns the most severe of the ranks' codes, in the order skipped < ok < verification_failed <
/// usage < runtime < timeout. Collective.
ExitCode agree_on(Communicator& comm, ExitCode mine);

/// Blocking collectives over small host values.
double all_reduce_value(Communicator& comm, double value, ReduceOp op);
int64_t all_reduce_value(Communicator& comm, int64_t value, ReduceOp op);
/// Returns every rank's value, in rank order.
template <class T>
std::vector<T> all_gather_value(Communicator& comm, const T& value) {
  HostStream stream;
  std::vector<T> all(comm.size());
  comm.all_gather(bytes_of(std::span<const T>(&value, 1)), writable_bytes_of(std::span<T>(all)),
                  stream, "gathering a value of every rank")
      ->wait();
  return all;
}
std::string broadcast_string(Communicator& comm, std::string value, int root);

}  // namespace gyre
