#pragma once
// Agreement about errors: what one rank finds ends all ranks, with the same code and message.

#include <functional>
#include <initializer_list>

#include "comm/communicator.hpp"
#include "core/error.hpp"

namespace gyre {

/// Throws what all ranks of `comm` throw at this place: an AgreedError where these are all ranks of
/// the run; else an Error, since the other ranks know nothing of it.
[[noreturn]] void throw_to_all(const Communicator& comm, ExitCode code, const std::string& message);

/// Runs `local` (no communication inside) on every rank. If any rank throws, all ranks throw the
/// error of the lowest such rank (throw_to_all). Collective; `what` names the step. Unless all
/// ranks fail, the message names the rank.
void run_agreed(Communicator& comm, std::string_view what, const std::function<void()>& local);

/// Runs `work`, in which all ranks of `comm` wait for each other in another way than by `comm`, as
/// in collective calls of HDF5, in the `local` of run_agreed. What it throws ends the run, because
/// this rank would not come to where the others wait; in a group of one rank it is thrown.
void run_in_step(const Communicator& comm, const std::function<void()>& work);

/// Runs `work` on rank 0 alone; if it throws, all ranks throw its error (throw_to_all).
/// Collective.
void run_on_root(Communicator& comm, std::string_view what, const std::function<void()>& work);

/// An argument that must be the same on all ranks of a group.
struct SameOnAllRanks {
  std::string_view name;
  int64_t value;
};

/// Runs `check` (no communication inside) on every rank and compares `arguments` over the ranks. If
/// a check throws or an argument differs, all ranks throw the same error (throw_to_all); a
/// difference is a usage error that names both values. Collective: two small all-gathers.
void agree_on_arguments(Communicator& comm, std::string_view what,
                        const std::function<void()>& check,
                        std::initializer_list<SameOnAllRanks> arguments);

/// The most severe of the ranks' codes, in the order skipped < ok < verification_failed < usage <
/// runtime < timeout. Collective.
ExitCode agree_on(Communicator& comm, ExitCode mine);

/// Blocking collectives over small host values.
double all_reduce_value(Communicator& comm, double value, ReduceOp op);
int64_t all_reduce_value(Communicator& comm, int64_t value, ReduceOp op);
/// Every rank's value, in rank order.
std::vector<double> all_gather_value(Communicator& comm, double value);
std::vector<int64_t> all_gather_value(Communicator& comm, int64_t value);
std::string broadcast_string(Communicator& comm, std::string value, int root);

}  // namespace gyre
