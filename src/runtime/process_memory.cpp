#include "runtime/process_memory.hpp"

#include <fstream>
#include <sstream>
#include <string>

namespace gyre {

ProcessMemory process_memory() {
  ProcessMemory memory;
  std::ifstream file("/proc/self/status");
  for (std::string line; std::getline(file, line);) {
    std::istringstream words(line);
    std::string name;
    int64_t kilobytes = 0;
    if (!(words >> name >> kilobytes)) continue;
    if (name == "VmRSS:") memory.now_bytes = kilobytes * 1024;
    if (name == "VmHWM:") memory.peak_bytes = kilobytes * 1024;
  }
  return memory;
}

}  // namespace gyre
