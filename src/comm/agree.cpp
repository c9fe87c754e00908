#include "comm/agree.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <new>

#include "comm/local_work.hpp"
#include "core/checksum.hpp"

namespace gyre {
namespace {

int64_t severity(ExitCode code) {
  return std::ranges::find(exit_codes, code) - std::begin(exit_codes);
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

/// Status of a rank in one word: its exit code (8 bits), a checksum of the code (24), and a
/// checksum of the arguments that it sends next (32), so that a changed bit is noticed.
uint64_t status_of(uint64_t code, std::span<const int64_t> arguments) {
  const uint64_t of_code = checksum_of(bytes_of(std::span<const uint64_t>(&code, 1)));
  return checksum_of(bytes_of(arguments)) << 32 | (of_code & 0xffffff) << 8 | code;
}

/// Like run_agreed, for ranks that compare `arguments` next. Returns the status of each rank.
std::vector<int64_t> run_agreed_before(Communicator& comm, std::string_view what,
                                       const std::function<void()>& local,
                                       std::span<const int64_t> arguments) {
  const Outcome mine = attempt(what, local);
  const uint64_t status = status_of(static_cast<uint64_t>(mine.code), arguments);
  const std::vector<int64_t> all = all_gather_value(comm, static_cast<int64_t>(status));
  const auto code_of = [](int64_t of_rank) { return of_rank & 0xff; };
  const auto failed = [&](int64_t of_rank) { return code_of(of_rank) != 0; };
  for (size_t r = 0; r < all.size(); ++r) {
    const int64_t code = code_of(all[r]);
    const auto expected = static_cast<uint32_t>(status_of(code, {}));
    if (!is_exit_code(code) || static_cast<uint32_t>(all[r]) != expected)
      throw_runtime("{}: rank {} says that its status is {:#x}, which no rank can", what, r,
                    static_cast<uint64_t>(all[r]));
  }
  const auto first = std::find_if(all.begin(), all.end(), failed);
  if (first == all.end()) return all;
  const int rank = static_cast<int>(first - all.begin());
  std::string message = broadcast_string(comm, mine.message, rank);
  if (!std::all_of(all.begin(), all.end(), failed))
    message += fmt::format(" (found on rank {})", rank);
  throw_to_all(comm, static_cast<ExitCode>(code_of(*first)), message);
}

/// Runs `check` as run_agreed does, and returns a text that names the first argument that differs
/// between ranks, or "".
std::string difference(Communicator& comm, std::string_view what,
                       const std::function<void()>& check,
                       std::initializer_list<SameOnAllRanks> arguments) {
  std::vector<int64_t> mine;
  for (const SameOnAllRanks& argument : arguments) mine.push_back(argument.value);
  const std::vector<int64_t> status = run_agreed_before(comm, what, check, mine);
  std::vector<int64_t> all(mine.size() * status.size());
  HostStream stream;
  comm.all_gather(bytes_of(std::span<const int64_t>(mine)),
                  writable_bytes_of(std::span<int64_t>(all)), stream, what)
      ->wait();
  const auto of_rank = [&](size_t r) {
    return std::span<const int64_t>(all).subspan(r * mine.size(), mine.size());
  };
  for (size_t r = 0; r < status.size(); ++r)
    if (status_of(0, of_rank(r)) != static_cast<uint64_t>(status[r]))
      throw_runtime("{}: the arguments of rank {} are not those that it sent", what, r);
  for (size_t i = 0; i < mine.size(); ++i)
    for (size_t r = 1; r < status.size(); ++r)
      if (of_rank(r)[i] != all[i])
        return fmt::format(
            "{}: {} is {} on rank 0, but {} on rank {}; "
            "it must be the same on all ranks of the group",
            what, arguments.begin()[i].name, all[i], of_rank(r)[i], r);
  return "";
}

}  // namespace

void throw_to_all(const Communicator& comm, ExitCode code, const std::string& message) {
  if (comm.size() == comm.transport().ranks_of_run()) throw AgreedError(code, message);
  throw Error(code, message);
}

double all_reduce_value(Communicator& comm, double value, ReduceOp op) {
  return reduce_value(comm, value, op);
}
int64_t all_reduce_value(Communicator& comm, int64_t value, ReduceOp op) {
  return reduce_value(comm, value, op);
}
std::string broadcast_string(Communicator& comm, std::string value, int root) {
  HostStream stream;
  int64_t length = std::ssize(value);
  comm.broadcast(writable_bytes_of(std::span<int64_t>(&length, 1)), root, stream,
                 "length of a text")
      ->wait();
  value.resize(length);
  comm.broadcast(writable_bytes_of(std::span<char>(value)), root, stream, "text")->wait();
  return value;
}

void agree_on_arguments(Communicator& comm, std::string_view what,
                        const std::function<void()>& check,
                        std::initializer_list<SameOnAllRanks> arguments, Communicator* together) {
  if (together == nullptr) {
    const std::string different = difference(comm, what, check, arguments);
    if (!different.empty()) throw_to_all(comm, ExitCode::usage, different);
    return;
  }
  run_agreed(*together, what, check);
  const std::string different = difference(
      comm, what, [] {}, arguments);
  run_agreed(*together, what, [&] {
    if (!different.empty()) throw_usage("{}", different);
  });
}

ExitCode agree_on(Communicator& comm, ExitCode mine) {
  const int64_t worst = all_reduce_value(comm, severity(mine), ReduceOp::max);
  for (ExitCode code : exit_codes)
    if (severity(code) == worst) return code;
  throw_runtime("a rank says that its status is of severity {}, which no rank can", worst);
}

void run_agreed(Communicator& comm, std::string_view what, const std::function<void()>& local) {
  run_agreed_before(comm, what, local, {});
}

void run_in_step(const Communicator& comm, const std::function<void()>& work) {
  if (comm.size() == 1) return work();
  [&]() noexcept { work(); }();
}

void run_on_root(Communicator& comm, std::string_view what, const std::function<void()>& work) {
  Outcome outcome{ExitCode::skipped, ""};  // the least severe, so that the code of rank 0 counts
  if (comm.rank() == 0) outcome = attempt(what, work);
  const ExitCode code = agree_on(comm, outcome.code);
  if (code != ExitCode::ok) throw_to_all(comm, code, broadcast_string(comm, outcome.message, 0));
}

}  // namespace gyre
