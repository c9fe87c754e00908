#include "comm/agree.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <new>

#include "comm/local_work.hpp"
#include "runtime/mpi_env.hpp"

namespace gyre {
namespace {

constexpr ExitCode exit_codes[] = {
    ExitCode::skipped, ExitCode::ok,      ExitCode::verification_failed,
    ExitCode::usage,   ExitCode::runtime, ExitCode::timeout};

int severity(ExitCode code) {
  switch (code) {
    case ExitCode::skipped:
      return 0;
    case ExitCode::ok:
      return 1;
    case ExitCode::verification_failed:
      return 2;
    case ExitCode::usage:
      return 3;
    case ExitCode::runtime:
      return 4;
    case ExitCode::timeout:
      return 5;
  }
  return 4;
}

bool is_exit_code(int64_t code) {
  for (ExitCode known : exit_codes)
    if (static_cast<int64_t>(known) == code) return true;
  return false;
}

/// Result of some work on this rank.
struct Outcome {
  ExitCode code = ExitCode::ok;
  std::string message;
};

Outcome attempt(std::string_view what, const std::function<void()>& work) {
  try {
    const LocalWork scope;
    work();
    return {};
  } catch (const Error& error) {
    return {error.code(), error.what()};
  } catch (const std::bad_alloc&) {
    return {ExitCode::runtime, fmt::format("{}: there is not enough memory", what)};
  } catch (const std::exception& error) {
    return {ExitCode::runtime, fmt::format("{}: {}", what, error.what())};
  }
}

template <class T>
T reduce_value(Communicator& comm, T value, ReduceOp op) {
  HostStream stream;
  comm.all_reduce(&value, 1, dtype_of<T>, op, stream, "agreeing on a value")->wait();
  return value;
}

template <class T>
std::vector<T> gather_value(Communicator& comm, T value) {
  HostStream stream;
  std::vector<T> all(static_cast<size_t>(comm.size()));
  comm.all_gather(bytes_of(std::span<const T>(&value, 1)), writable_bytes_of(std::span<T>(all)),
                  stream, "gathering a value of every rank")
      ->wait();
  return all;
}

}  // namespace

void throw_to_all(const Communicator& comm, ExitCode code, const std::string& message) {
  if (comm.size() == MpiEnvironment::world_size()) throw AgreedError(code, message);
  throw Error(code, message);
}

double all_reduce_value(Communicator& comm, double value, ReduceOp op) {
  return reduce_value(comm, value, op);
}
int64_t all_reduce_value(Communicator& comm, int64_t value, ReduceOp op) {
  return reduce_value(comm, value, op);
}
std::vector<double> all_gather_value(Communicator& comm, double value) {
  return gather_value(comm, value);
}
std::vector<int64_t> all_gather_value(Communicator& comm, int64_t value) {
  return gather_value(comm, value);
}

std::string broadcast_string(Communicator& comm, std::string value, int root) {
  HostStream stream;
  int64_t length = std::ssize(value);
  comm.broadcast(writable_bytes_of(std::span<int64_t>(&length, 1)), root, stream,
                 "length of a text")
      ->wait();
  value.resize(static_cast<size_t>(length));
  comm.broadcast(writable_bytes_of(std::span<char>(value)), root, stream, "text")->wait();
  return value;
}

void agree_on_arguments(Communicator& comm, std::string_view what,
                        const std::function<void()>& check,
                        std::initializer_list<SameOnAllRanks> arguments) {
  run_agreed(comm, what, check);
  std::vector<int64_t> mine;
  for (const SameOnAllRanks& argument : arguments) mine.push_back(argument.value);
  std::vector<int64_t> all(mine.size() * static_cast<size_t>(comm.size()));
  HostStream stream;
  comm.all_gather(bytes_of(std::span<const int64_t>(mine)),
                  writable_bytes_of(std::span<int64_t>(all)), stream, what)
      ->wait();
  size_t i = 0;
  for (const SameOnAllRanks& argument : arguments) {
    for (int r = 1; r < comm.size(); ++r) {
      const int64_t other = all[static_cast<size_t>(r) * mine.size() + i];
      if (other != all[i])
        throw_to_all(comm, ExitCode::usage,
                     fmt::format("{}: {} is {} on rank 0, but {} on rank {}; it must be the same "
                                 "on all ranks of the group",
                                 what, argument.name, all[i], other, r));
    }
    ++i;
  }
}

ExitCode agree_on(Communicator& comm, ExitCode mine) {
  const int64_t worst = all_reduce_value(comm, int64_t{severity(mine)}, ReduceOp::max);
  for (ExitCode code : exit_codes)
    if (severity(code) == worst) return code;
  throw_runtime("a rank says that its status is of severity {}, which no rank can", worst);
}

void run_agreed(Communicator& comm, std::string_view what, const std::function<void()>& local) {
  const Outcome mine = attempt(what, local);
  const std::vector<int64_t> codes = all_gather_value(comm, static_cast<int64_t>(mine.code));
  const auto failed = [](int64_t code) { return code != 0; };
  for (size_t r = 0; r < codes.size(); ++r)
    if (!is_exit_code(codes[r]))
      throw_runtime("{}: rank {} says that its status is {}, which no rank can", what, r, codes[r]);
  const auto first = std::find_if(codes.begin(), codes.end(), failed);
  if (first == codes.end()) return;
  const int rank = static_cast<int>(first - codes.begin());
  std::string message = broadcast_string(comm, mine.message, rank);
  if (!std::all_of(codes.begin(), codes.end(), failed))
    message += fmt::format(" (found on rank {})", rank);
  throw_to_all(comm, static_cast<ExitCode>(*first), message);
}

void run_in_step(const Communicator& comm, const std::function<void()>& work) {
  if (comm.size() == 1) return work();
  [&]() noexcept { work(); }();
}

void run_on_root(Communicator& comm, std::string_view what, const std::function<void()>& work) {
  Outcome outcome;
  if (comm.rank() == 0) outcome = attempt(what, work);
  const ExitCode code = agree_on(comm, outcome.code);
  if (code != ExitCode::ok) throw_to_all(comm, code, broadcast_string(comm, outcome.message, 0));
}

}  // namespace gyre
