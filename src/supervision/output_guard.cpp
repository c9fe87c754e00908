#include "supervision/output_guard.hpp"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <utility>

#include "core/error.hpp"
#include "runtime/process.hpp"
#include "supervision/guard.hpp"

namespace gyre {
namespace {

/// Returns a name that no other OutputGuard of this process uses, not even later.
std::string temporary_name(const std::string& path) {
  static std::atomic<int> guards = 0;
  return fmt::format("{}.tmp-{}-{}", path, getpid(), ++guards);
}

/// "out/scores.invalid.h5" for "out/scores.h5".
std::filesystem::path invalid_name(const std::filesystem::path& path) {
  std::filesystem::path name = path.stem();
  name += ".invalid";
  name += path.extension();
  return path.parent_path() / name;
}

/// Whether a path without links is an open descriptor.
bool is_descriptor(const std::filesystem::path& path) {
  const std::filesystem::path folder = path.parent_path();
  return folder.filename() == "fd" && folder.string().starts_with("/proc/");
}

/// Resolves all links; the result is the path that renaming replaces.
std::filesystem::path after_links(const std::string& path) {
  std::error_code ignored;
  std::filesystem::path place = std::filesystem::absolute(path, ignored);
  for (int links = 0; links < 40; ++links) {
    const auto folder = std::filesystem::weakly_canonical(place.parent_path(), ignored);
    if (!ignored) place = folder / place.filename();
    const auto target = std::filesystem::read_symlink(place, ignored);
    if (ignored || is_descriptor(place)) break;
    place = folder / target;  // an absolute target replaces the folder
  }
  return place;
}

/// Identity of the file at the path of an output or input.
struct Place {
  explicit Place(const std::string& name) : path(after_links(name)) {
    exists = stat(name.c_str(), &status) == 0;
    if (!exists) error = errno;
  }
  bool is_special() const { return is_descriptor(path) || (exists && !S_ISREG(status.st_mode)); }
  bool operator==(const Place& other) const {
    return path == other.path || (exists && other.exists && status.st_dev == other.status.st_dev &&
                                  status.st_ino == other.status.st_ino);
  }

  std::filesystem::path path;
  bool exists = false;
  int error = 0;  // errno of stat
  struct stat status {};
};

void check_place(const std::string& path, const Place& place) {
  if (!place.exists && place.error != ENOENT)
    throw_usage("cannot write '{}': {}", path, std::strerror(place.error));
  if (place.exists && S_ISDIR(place.status.st_mode))
    throw_usage("cannot write '{}': it is a folder", path);
  if (place.is_special()) throw_usage("cannot write '{}': it is there and no regular file", path);
  const std::string folder = place.path.parent_path().string();
  struct stat status {};
  if (stat(folder.c_str(), &status) != 0 || !S_ISDIR(status.st_mode))
    throw_usage("cannot write '{}': there is no folder '{}'", path, folder);
  if (access(folder.c_str(), W_OK) != 0)
    throw_usage("cannot write '{}' in the folder '{}': {}", path, folder, std::strerror(errno));
}

/// A file that an output must not be, with a name for messages.
struct Taken {
  Place place;
  std::string name;
};

void check_output(const NamedPath& output, bool is_text, std::vector<Taken>& taken) {
  const Place place(output.path);
  if (is_text && place.is_special()) return;
  check_place(output.path, place);
  const std::string invalid = invalid_name(output.path).string();
  for (const auto& [other, name] : taken) {
    if (other == place) throw_usage("{} '{}' is the file of {}", output.option, output.path, name);
    if (!is_text && other == Place(invalid))
      throw_usage("{} '{}' would be '{}' if its results were wrong, the file of {}", output.option,
                  output.path, invalid, name);
  }
  taken.push_back({place, output.option});
}

}  // namespace

void check_output_places(const RunFiles& files) {
  std::vector<Taken> taken;
  for (const NamedPath& input : files.inputs)
    if (!input.path.empty()) taken.push_back({Place(input.path), input.option});
  taken.push_back({Place("/proc/self/fd/1"), "standard output"});
  taken.push_back({Place("/proc/self/fd/2"), "standard error"});
  for (const auto* outputs : {&files.outputs, &files.texts})
    for (const NamedPath& output : *outputs)
      if (!output.path.empty()) check_output(output, outputs == &files.texts, taken);
}

bool is_same_file(const std::string& a, const std::string& b) {
  return Place(a) == Place(b);
}

bool is_special(const std::string& path) {
  return Place(path).is_special();
}

int open_special(const std::string& path) {
  const Place place(path);
  const bool is_own = place.path.parent_path() == fmt::format("/proc/{}/fd", getpid());
  const int descriptor =
      is_own ? fcntl(std::atoi(place.path.filename().c_str()), F_DUPFD_CLOEXEC, STDERR_FILENO + 1)
             : open(path.c_str(), O_WRONLY | O_NOCTTY | O_CLOEXEC);
  if (descriptor < 0) throw_usage("cannot write '{}': {}", path, std::strerror(errno));
  return descriptor;
}

OutputGuard::OutputGuard(std::string path) : path_(std::move(path)) {
  const Place place(path_);
  check_place(path_, place);
  if (std::filesystem::is_symlink(path_)) path_ = place.path.string();
  temporary_ = temporary_name(path_);
  guard_file(temporary_);
}

OutputGuard::~OutputGuard() {
  if (temporary_.empty()) return;
  std::error_code ignored;
  std::filesystem::remove(temporary_, ignored);
  release_file(temporary_);
}

const std::string& OutputGuard::name_as_invalid() {
  path_ = invalid_name(path_).string();
  return path_;
}

void OutputGuard::commit() {
  struct stat status {};
  if (lstat(path_.c_str(), &status) == 0 && !S_ISREG(status.st_mode))
    throw_runtime("cannot write '{}': it is there and no regular file", path_);
  if (std::rename(temporary_.c_str(), path_.c_str()) != 0)
    throw_runtime("cannot rename '{}' to '{}': {}", temporary_, path_, std::strerror(errno));
  release_file(temporary_);
  temporary_.clear();
}

std::unique_ptr<OutputGuard> write_temporary(const std::string& path, const std::string& text) {
  auto guard = std::make_unique<OutputGuard>(path);
  const std::string& name = guard->temporary_path();
  const int file = open(name.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666);
  int error = file < 0 ? errno : write_all(file, text);
  if (file >= 0 && close(file) != 0 && error == 0) error = errno;
  if (error != 0) throw_runtime("cannot write '{}': {}", name, std::strerror(error));
  return guard;
}

}  // namespace gyre
