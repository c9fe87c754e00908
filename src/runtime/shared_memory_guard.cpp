#include "runtime/shared_memory_guard.hpp"

#include <fcntl.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cctype>
#include <csignal>
#include <cstring>
#include <ctime>
#include <filesystem>
#include <fstream>
#include <set>
#include <string>

#include "runtime/supervisor.hpp"

namespace gyre {
namespace {

constexpr char folder[] = "/dev/shm/";
constexpr char guard_name[] = "gyre-shm-guard";
constexpr int rounds = 40;
constexpr useconds_t pause_us = 50'000;

using Names = std::set<std::string>;

/// Calls `see(path)` for each entry of a folder; entries may vanish meanwhile.
template <class See>
void for_each_entry(const std::filesystem::path& in, See see) {
  std::error_code gone;
  for (std::filesystem::directory_iterator entry(in, gone), end; !gone && entry != end;
       entry.increment(gone))
    see(entry->path());
}

/// Names in /dev/shm of MPICH and UCX files that this user has created or changed since `start`.
Names files_since(time_t start) {
  Names found;
  for_each_entry(folder, [&](const std::filesystem::path& path) {
    const std::string name = path.filename();
    struct stat status {};
    if ((name.starts_with("mpich_shar_tmp") || name.starts_with("ucx_shm_posix_")) &&
        stat(path.c_str(), &status) == 0 && status.st_uid == geteuid() && status.st_ctime >= start)
      found.insert(name);
  });
  return found;
}

/// Adds the name in /dev/shm at the end of a line of /proc/PID/maps or of a link of /proc/PID/fd.
void add_name(Names& names, const std::string& text) {
  if (const size_t at = text.find(folder); at != std::string::npos)
    names.insert(text.substr(at + std::strlen(folder)));
}

/// Names in /dev/shm that any process of this user has open or mapped.
Names names_in_use() {
  Names used;
  for_each_entry("/proc", [&](const std::filesystem::path& process) {
    if (std::isdigit(static_cast<unsigned char>(process.filename().string()[0])) == 0) return;
    std::ifstream maps(process / "maps");
    for (std::string line; std::getline(maps, line);) add_name(used, line);
    for_each_entry(process / "fd", [&](const std::filesystem::path& file) {
      std::error_code closed;
      add_name(used, std::filesystem::read_symlink(file, closed).string());
    });
  });
  return used;
}

bool has_ended(pid_t process) {
  const char state = process_state(process);
  return state == 0 || state == 'Z';
}

/// The other ranks of this host end at about the same time and the launcher after them, so files
/// are checked repeatedly until the launcher has ended. Files are listed before processes, because
/// the creator of a new file still uses it.
void remove_unused_files(time_t start, pid_t launcher) {
  for (int round = 0; round < rounds; ++round) {
    const bool last_ended = has_ended(launcher);
    const Names files = files_since(start);
    if (files.empty() && last_ended) return;
    const Names used = names_in_use();
    for (const std::string& name : files)
      if (!used.contains(name)) unlink((folder + name).c_str());
    usleep(pause_us);
  }
}

void rename_process(int argc, char** argv) {
  prctl(PR_SET_NAME, guard_name);
  const char* const end = argv[argc - 1] + std::strlen(argv[argc - 1]);
  if (end <= argv[0]) return;
  std::memset(argv[0], 0, end - argv[0]);
  std::strncpy(argv[0], guard_name, end - argv[0]);
}

[[noreturn]] void guard(int pipe, pid_t launcher) {
  const time_t start = time(nullptr) - 1;  // file timestamps lag behind the clock
  setsid();
  for (const int signal : {SIGHUP, SIGINT, SIGTERM, SIGUSR1}) std::signal(signal, SIG_IGN);
  const int nothing = open("/dev/null", O_RDWR);
  for (const int standard : {STDIN_FILENO, STDOUT_FILENO, STDERR_FILENO}) dup2(nothing, standard);
  const int kept = STDERR_FILENO + 1;
  if (pipe != kept) dup2(pipe, kept);
  close_range(kept + 1, ~0U, 0);
  char none = 0;
  while (read(kept, &none, 1) > 0) {
  }
  remove_unused_files(start, launcher);
  _exit(0);
}

}  // namespace

void guard_shared_memory(int argc, char** argv) {
  int ends[2];
  if (argc < 1 || access(folder, W_OK) != 0 || pipe2(ends, O_CLOEXEC) != 0) return;
  const pid_t launcher = getppid();
  const pid_t child = fork();
  if (child == 0) {
    // Forks twice, so that the guard is no child of the supervisor and is not taken for a rank.
    rename_process(argc, argv);
    close(ends[1]);
    if (fork() == 0) guard(ends[0], launcher);
    _exit(0);
  }
  if (child > 0) waitpid(child, nullptr, 0);
  close(ends[0]);  // the other end stays open while a rank or its supervisor lives
}

}  // namespace gyre
