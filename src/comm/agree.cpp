#include "comm/agree.hpp"

#include <fmt/format.h>

#include <cstring>

namespace gyre {
namespace {

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

ExitCode agree_on(Communicator& comm, ExitCode mine) {
  const int64_t worst = all_reduce_value(comm, int64_t{severity(mine)}, ReduceOp::max);
  for (ExitCode code : {ExitCode::skipped, ExitCode::ok, ExitCode::verification_failed,
                        ExitCode::usage, ExitCode::runtime, ExitCode::timeout})
    if (severity(code) == worst) return code;
  return ExitCode::runtime;
}

void run_agreed(Communicator& comm, std::string_view what, const std::function<void()>& local) {
  ExitCode code = ExitCode::ok;
  std::string message;
  try {
    local();
  } catch (const Error& error) {
    code = error.code();
    message = error.what();
  } catch (const std::exception& error) {
    code = ExitCode::runtime;
    message = fmt::format("{}: {}", what, error.what());
  }
  const std::vector<int64_t> codes = all_gather_value(comm, static_cast<int64_t>(code));
  int first = -1, failures = 0;
  for (int r = 0; r < comm.size(); ++r) {
    if (codes[static_cast<size_t>(r)] == 0) continue;
    if (first < 0) first = r;
    ++failures;
  }
  if (first < 0) return;
  message = broadcast_string(comm, message, first);
  if (failures < comm.size()) message += fmt::format(" (found on rank {})", first);
  throw Error(static_cast<ExitCode>(codes[static_cast<size_t>(first)]), message, true);
}

}  // namespace gyre
