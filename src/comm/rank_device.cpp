#include "comm/rank_device.hpp"

#include <fmt/ranges.h>

#include <algorithm>

#include "core/error.hpp"

namespace gyre {

bool same_device(const RankDevice& a, const RankDevice& b) {
  return a.uuid == b.uuid && a.host == b.host;
}

void require_own_devices(const std::vector<RankDevice>& devices) {
  const auto shared = std::find_if(devices.begin(), devices.end(),
                                   [](const RankDevice& device) { return device.sharers > 1; });
  if (shared == devices.end()) return;
  std::vector<int> ranks;
  for (const RankDevice& other : devices)
    if (same_device(*shared, other)) ranks.push_back(other.rank);
  throw_runtime(
      "ranks {} on host {} have one CUDA device, {} ({}); start one rank for each device, or let "
      "them share it with --share-gpus, for checking: its times are not official",
      fmt::join(ranks, ", "), shared->host, to_string(*shared), shared->uuid);
}

std::string visibility_note(const std::vector<RankDevice>& devices) {
  for (const RankDevice& first : devices) {
    std::vector<int> ranks;
    for (const RankDevice& other : devices)
      if (other.host == first.host && other.visible == 1 && other.sharers == 1)
        ranks.push_back(other.rank);
    if (ranks.size() < 2) continue;
    return fmt::format(
        "ranks {} on host {} see one GPU each and no other rank's, so NCCL may copy through the "
        "host; let every rank see all GPUs (it uses its own): srun --gpus-per-node={} "
        "--gpu-bind=none instead of --gpus-per-task=1, or CUDA_VISIBLE_DEVICES unset",
        fmt::join(ranks, ", "), first.host, ranks.size());
  }
  return "";
}

std::string to_string(const RankDevice& device) {
  return fmt::format("{} {} ({}.{})", device.device, device.name, device.major, device.minor);
}

}  // namespace gyre
