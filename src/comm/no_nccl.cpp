// NCCL functions in a build without NCCL.

#include "comm/nccl.hpp"
#include "comm/nccl_version.hpp"
#include "core/error.hpp"

namespace gyre {

std::unique_ptr<Communicator> make_nccl_communicator(Communicator& /*host*/) {
  throw_runtime("communication by NCCL: this build has no NCCL");
}

bool use_nccl_memory() {
  return false;
}

std::string nccl_version() {
  return "no";
}

}  // namespace gyre
