// GPU functions in a build without CUDA: all throw, or report that there is none.

#include "comm/cuda_device.hpp"
#include "comm/staged.hpp"
#include "core/error.hpp"

namespace gyre {

std::vector<RankDevice> bind_device(Communicator& /*host*/, bool /*share_gpus*/) {
  throw_runtime("choosing a CUDA device: this build has no CUDA");
}

std::string cuda_version() {
  return "no";
}

std::unique_ptr<Communicator> make_staged_communicator(Communicator& /*host*/) {
  throw_runtime("staged communication of GPU memory: this build has no CUDA");
}

std::unique_ptr<Communicator> make_gpu_aware_communicator(std::unique_ptr<Communicator> /*mpi*/) {
  throw_runtime("MPI of GPU memory: this build has no CUDA");
}

}  // namespace gyre
