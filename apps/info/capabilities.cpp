#include "apps/info/capabilities.hpp"

#include "apps/common/type_options.hpp"
#include "apps/logprobs/registry.hpp"
#include "attention/kernels/make_kernel.hpp"
#include "attention/schedules/registry.hpp"
#include "harness/backend.hpp"
#include "packing/bins.hpp"
#include "runtime/features.hpp"
#include "runtime/mpi_env.hpp"
#include "sharding/layouts.hpp"

namespace gyre {
namespace {

template <class Entry>
std::vector<std::string> names_of(const std::vector<Entry>& entries) {
  std::vector<std::string> names;
  for (const Entry& entry : entries) names.push_back(entry.name);
  return names;
}

std::vector<std::string> libraries() {
  std::vector<std::string> names;
  for (const auto& [name, built] : {std::pair{"cuda", with_cuda},
                                    {"nccl", with_nccl},
                                    {"cudnn", with_cudnn},
                                    {"gpu-aware-mpi", mpi_takes_gpu_memory()},
                                    {"software-gpu", software_gpu}})
    if (built) names.emplace_back(name);
  return names;
}

std::vector<std::string> kernels() {
  std::vector<std::string> names;
  for (const KernelKind& kind : kernel_kinds())
    if (kind.built) names.push_back(kind.name);
  return names;
}

}  // namespace

std::vector<Capability> capabilities() {
  return {{"features", libraries()},
          {"backends", built_backends()},
          {"transports", built_comms()},
          {"types", activation_type_names()},
          {"packers", names_of(bin_packers())},
          {"layouts", names_of(layout_kinds())},
          {"schedules", names_of(schedules())},
          {"attention_kernels", kernels()},
          {"operations", names_of(logprobs_operations())}};
}

}  // namespace gyre
