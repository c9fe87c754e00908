#include "supervision/shared_memory.hpp"

#include <dirent.h>
#include <fmt/format.h>
#include <sys/stat.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <set>
#include <string>

#include "runtime/process.hpp"

namespace gyre {
namespace {

/// Calls visit(name) for the entries of a folder; for none if it cannot be read or vanishes, as
/// those of processes do.
template <class Visit>
void for_each_entry(const std::string& folder, const Visit& visit) {
  DIR* open = opendir(folder.c_str());
  if (open == nullptr) return;
  while (const dirent* entry = readdir(open)) visit(std::string(entry->d_name));
  closedir(open);
}

std::set<std::string> files_of_mpi(time_t since) {
  std::set<std::string> files;
  for_each_entry("/dev/shm", [&](const std::string& name) {
    if (!name.starts_with("mpich_shar_tmp") && !name.starts_with("ucx_shm_posix_")) return;
    const std::string path = "/dev/shm/" + name;
    struct stat status {};
    if (lstat(path.c_str(), &status) == 0 && status.st_uid == getuid() && status.st_ctime >= since)
      files.insert(path);
  });
  return files;
}

/// Erases what occurs in `text`: links of descriptors and lines of maps have more than the path.
void erase_mentioned(std::set<std::string>& files, const std::string& text) {
  std::erase_if(files,
                [&](const std::string& file) { return text.find(file) != std::string::npos; });
}

/// Erases the files that a process has open or mapped. UCX has files open without mapping them.
void erase_used(std::set<std::string>& files) {
  for_each_entry("/proc", [&](const std::string& process) {
    if (process[0] < '0' || process[0] > '9') return;
    std::ifstream maps(fmt::format("/proc/{}/maps", process));
    for (std::string line; std::getline(maps, line);) erase_mentioned(files, line);
    const std::string folder = fmt::format("/proc/{}/fd/", process);
    for_each_entry(folder, [&](const std::string& descriptor) {
      std::error_code gone;
      erase_mentioned(files, std::filesystem::read_symlink(folder + descriptor, gone).string());
    });
  });
}

}  // namespace

void remove_shared_memory(time_t since, pid_t launcher) {
  for (int round = 0; round < 20; ++round) {
    // Files are listed before processes, because the creator of a new file still uses it.
    std::set<std::string> files = files_of_mpi(since);
    if (files.empty() && process_state(launcher) == '\0') return;
    if (!files.empty()) erase_used(files);
    for (const std::string& file : files) unlink(file.c_str());
    usleep(100'000);
  }
}

}  // namespace gyre
