#pragma once
// The programs of a rank as tasks that require others, which formats of other simulators hold:
//
//     spend           a computation; the computations of a rank follow each other
//     send, receive   require what the rank has done before, and nothing requires them but a wait
//     wait            a computation of no time, which requires the messages of its exchange

#include <string>
#include <vector>

#include "predict/program.hpp"

namespace gyre {

struct Task {
  enum class Kind { compute, send, receive };
  Kind kind = Kind::compute;
  double seconds = 0;  ///< compute
  int64_t bytes = 0;   ///< of the message
  int peer = 0;        ///< the other rank of the message
  int64_t tag = 0;     ///< number of earlier messages between the two ranks in this direction
  /// Labels of tasks that must have ended; the label of the i-th task, from 0, is i + 1.
  std::vector<int64_t> required;
};

/// The tasks of a rank in all passes, which follow each other. Throws a usage error that names
/// `format` ("a GOAL schedule") if one has a library's collective, which has no messages.
std::vector<Task> tasks_of(const std::vector<Programs>& passes, int rank,
                           const std::string& format);

}  // namespace gyre
