#include "runtime/output_guard.hpp"

#include <fcntl.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <utility>

#include "core/error.hpp"

namespace gyre {
namespace {

constexpr const char* remove_unless_kept =
    "trap '' HUP INT TERM; read -r verdict; [ \"$verdict\" = keep ] || rm -f -- \"$1\"";

/// Starts the watcher of `file`. Returns the write end of its pipe, or -1 when it could not be
/// started: then only an orderly end cleans up.
int start_watcher(const std::string& file) {
  int ends[2];
  if (pipe2(ends, O_CLOEXEC) != 0) return -1;
  posix_spawn_file_actions_t actions;
  posix_spawn_file_actions_init(&actions);
  posix_spawn_file_actions_adddup2(&actions, ends[0], 0);
  posix_spawn_file_actions_addopen(&actions, 1, "/dev/null", O_WRONLY, 0);
  posix_spawn_file_actions_addopen(&actions, 2, "/dev/null", O_WRONLY, 0);
  posix_spawnattr_t attributes;
  posix_spawnattr_init(&attributes);
  posix_spawnattr_setflags(&attributes, POSIX_SPAWN_SETSID);
  std::string script = remove_unless_kept, path = file;
  char shell[] = "/bin/sh", option[] = "-c", name[] = "gyre-output-guard", locale[] = "LC_ALL=C";
  char search[] = "PATH=/usr/bin:/bin";
  char* arguments[] = {shell, option, script.data(), name, path.data(), nullptr};
  char* environment[] = {locale, search, nullptr};
  pid_t child = 0;
  const int failed = posix_spawn(&child, shell, &actions, &attributes, arguments, environment);
  posix_spawn_file_actions_destroy(&actions);
  posix_spawnattr_destroy(&attributes);
  close(ends[0]);
  if (failed != 0) {
    close(ends[1]);
    return -1;
  }
  return ends[1];
}

/// No two guards share a name, not even one after the other: the watcher of the first may still be
/// about to remove its file when the second has created its own.
std::string temporary_name(const std::string& path) {
  static std::atomic<int> guards = 0;
  return fmt::format("{}.tmp-{}-{}", path, getpid(), ++guards);
}

/// "out/scores.invalid.h5" of "out/scores.h5".
std::filesystem::path invalid_name(const std::filesystem::path& path) {
  std::filesystem::path name = path.stem();
  name += ".invalid";
  name += path.extension();
  return path.parent_path() / name;
}

std::string absolute(const std::string& path) {
  return std::filesystem::absolute(path).string();
}

void check_place(const std::string& path) {
  const std::filesystem::path folder = std::filesystem::path(absolute(path)).parent_path();
  if (!std::filesystem::is_directory(folder))
    throw_usage("cannot write '{}': there is no folder '{}'", path, folder.string());
  if (access(folder.c_str(), W_OK) != 0)
    throw_usage("cannot write '{}': no permission to write in '{}'", path, folder.string());
  if (std::filesystem::is_directory(path)) throw_usage("cannot write '{}': it is a folder", path);
  if (std::filesystem::exists(path) && !std::filesystem::is_regular_file(path))
    throw_usage("cannot write '{}': it is there and no regular file", path);
}

}  // namespace

void check_output_places(const std::vector<NamedPath>& outputs,
                         const std::vector<NamedPath>& inputs) {
  std::vector<std::pair<std::filesystem::path, std::string>> taken;
  const auto place = [](const NamedPath& file) {
    std::error_code error;  // /dev/stdin is a link to a pipe without a path: no output is that
    const auto path = std::filesystem::weakly_canonical(absolute(file.path), error);
    return error ? std::filesystem::path(absolute(file.path)) : path;
  };
  for (const NamedPath& input : inputs)
    if (!input.path.empty()) taken.emplace_back(place(input), input.option);
  for (const NamedPath& output : outputs) {
    if (output.path.empty()) continue;
    check_place(output.path);
    const std::string invalid = invalid_name(output.path).string();
    for (const auto& [path, option] : taken) {
      if (path == place(output))
        throw_usage("{} '{}' is the file of {}", output.option, output.path, option);
      if (path == place({output.option, invalid}))
        throw_usage("{} '{}' would be '{}' if its results were wrong, the file of {}",
                    output.option, output.path, invalid, option);
    }
    taken.emplace_back(place(output), output.option);
  }
}

OutputGuard::OutputGuard(std::string path) : path_(std::move(path)) {
  check_place(path_);
  temporary_ = temporary_name(path_);
  watcher_pipe_ = start_watcher(absolute(temporary_));
}

OutputGuard::~OutputGuard() {
  if (temporary_.empty()) return;
  std::error_code ignored;
  std::filesystem::remove(temporary_, ignored);
  if (watcher_pipe_ >= 0) close(watcher_pipe_);
}

const std::string& OutputGuard::name_as_invalid() {
  path_ = invalid_name(path_).string();
  return path_;
}

void OutputGuard::commit() {
  if (std::rename(temporary_.c_str(), path_.c_str()) != 0)
    throw_runtime("cannot rename '{}' to '{}': {}", temporary_, path_, std::strerror(errno));
  if (watcher_pipe_ >= 0) {
    [[maybe_unused]] const ssize_t written = write(watcher_pipe_, "keep\n", 5);
    close(watcher_pipe_);
  }
  temporary_.clear();
}

std::unique_ptr<OutputGuard> write_temporary(const std::string& path, const std::string& text) {
  auto guard = std::make_unique<OutputGuard>(path);
  std::ofstream out(guard->temporary_path(), std::ios::binary);
  out << text;
  out.close();
  if (!out) throw_runtime("cannot write '{}': {}", guard->temporary_path(), std::strerror(errno));
  return guard;
}

}  // namespace gyre
