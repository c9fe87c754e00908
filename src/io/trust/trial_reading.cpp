#include <fcntl.h>
#include <malloc.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <csignal>
#include <cstring>
#include <exception>
#include <fstream>
#include <set>
#include <tuple>

#include "core/error.hpp"
#include "io/h5_support.hpp"
#include "io/trust/content_digest.hpp"
#include "runtime/process.hpp"
#include "supervision/supervision.hpp"

namespace gyre::h5 {
namespace {

/// Larger files are not read in full, nor are datasets that claim to be larger.
constexpr int64_t max_bytes = max_content_bytes;

/// Exit codes of the child for damaged contents and for contents that are not supported; sanitizers
/// use neither.
constexpr int refused = 97, unusable = 98;

/// Additional memory that the child may use: what it reads is bounded, but HDF5 allocates, and
/// fills, whatever a damaged file claims.
constexpr int64_t max_memory = int64_t{1} << 30;

/// State of a visit of all objects of a file. HDF5 calls the functions below, which must not throw.
struct Visit {
  const std::string& path;
  bool whole;           // whether elements are read as well
  std::string object;   // the current one
  std::string failure;  // error of the first text or list that takes too much memory
};

/// Reads the elements of a dataset or attribute, of any type, through `read(type, transfer list,
/// buffer)`. A failed read is ignored: the program reports it if it reads the object. Claims of
/// gigabytes are refused, since the read would not end. A negative result ends the visit.
template <class Read>
herr_t read_elements(Visit& visit, const Handle& type, const Handle& space, const std::string& what,
                     const Read& read) {
  const Handle memory(H5Tget_native_type(type.get(), H5T_DIR_ASCEND), H5Tclose);
  const hssize_t count = H5Sget_simple_extent_npoints(space.get());
  const int64_t width = H5Tget_size(memory.get());
  if (!memory.valid() || count < 1 || width < 1 || count > max_bytes / width) return 0;
  std::vector<char> buffer(count * width);
  const detail::TextMemory text_memory(max_bytes);
  if (read(memory.get(), text_memory.transfer_list(), buffer.data()) >= 0) {
    if (H5Tdetect_class(memory.get(), H5T_STRING) > 0 ||
        H5Tdetect_class(memory.get(), H5T_VLEN) > 0)  // the call is slow for numbers
      H5Dvlen_reclaim(memory.get(), space.get(), H5P_DEFAULT, buffer.data());
    return 0;
  }
  const std::string reason = detail::deepest_message();
  if (reason.find("memory allocation failed") == std::string::npos) return 0;
  visit.failure = fmt::format("cannot read {} of '{}': {}", what, visit.path, reason);
  return -1;
}

herr_t read_attribute(hid_t object, const char* name, const H5A_info_t*, void* data) {
  auto& visit = *static_cast<Visit*>(data);
  const Handle attribute(H5Aopen(object, name, H5P_DEFAULT), H5Aclose);
  if (!attribute.valid()) return 0;
  return read_elements(
      visit, Handle(H5Aget_type(attribute.get()), H5Tclose),
      Handle(H5Aget_space(attribute.get()), H5Sclose),
      fmt::format("attribute '{}' of '{}'", name, visit.object),
      [&](hid_t type, hid_t, void* buffer) { return H5Aread(attribute.get(), type, buffer); });
}

herr_t read_object(hid_t file, const char* name, const H5O_info_t* info, void* data) {
  auto& visit = *static_cast<Visit*>(data);
  visit.object = std::string("/") + (std::strcmp(name, ".") == 0 ? "" : name);
  // Each object is opened from the root: the time would be cubic in the depth.
  if (std::ranges::count(visit.object, '/') > max_group_levels) return 1;
  const Handle object(H5Oopen(file, name, H5P_DEFAULT), H5Oclose);
  if (!object.valid()) return 0;
  H5Aiterate2(object.get(), H5_INDEX_NAME, H5_ITER_NATIVE, nullptr, read_attribute, data);
  if (!visit.failure.empty()) return -1;
  if (info->type != H5O_TYPE_DATASET || detail::foreign_storage(object.get()) != nullptr) return 0;
  const Handle type(H5Dget_type(object.get()), H5Tclose);
  const Handle space(H5Dget_space(object.get()), H5Sclose);
  if (!type.valid() || !space.valid() || !visit.whole) return 0;
  return read_elements(visit, type, space, fmt::format("dataset '{}'", visit.object),
                       [&](hid_t memory, hid_t transfer_list, void* buffer) {
                         return H5Dread(object.get(), memory, H5S_ALL, H5S_ALL, transfer_list,
                                        buffer);
                       });
}

/// Reads the objects of an open file, and their elements if `whole` is set. Contents that fail
/// their checksum are a runtime error.
void read_objects(hid_t file, const std::string& path, bool whole) {
  if (whole && has_content_digest(file, path)) return check_content_digest(file, path);
  Visit visit{path, whole, "/", ""};
  if (H5Ovisit2(file, H5_INDEX_NAME, H5_ITER_INC, read_object, &visit, H5O_INFO_BASIC) > 0)
    throw_usage("'{}' of '{}' is behind {} groups; at most {} are read", visit.object, path,
                max_group_levels, max_group_levels - 1);
  if (!visit.failure.empty()) throw_runtime("{}", visit.failure);
}

void limit_memory() {
  int64_t pages = 0;
  std::ifstream("/proc/self/statm") >> pages;
  const rlim_t most = pages * sysconf(_SC_PAGESIZE) + max_memory;
  rlimit limit{};
  if (pages == 0 || getrlimit(RLIMIT_AS, &limit) != 0 || limit.rlim_cur <= most) return;
  limit.rlim_cur = most;
  setrlimit(RLIMIT_AS, &limit);
}

void read_file(const std::string& path, bool whole) {
  const Handle file(H5Fopen(path.c_str(), H5F_ACC_RDONLY, H5P_DEFAULT), H5Fclose);
  if (file.valid()) read_objects(file.get(), path, whole);
}

/// Body of the child. It is a copy of one thread: it takes no lock of this program, and resets its
/// signals to their defaults.
[[noreturn]] void read_everything(pid_t parent, const std::string& path, bool whole, int error) {
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  if (getppid() != parent) _exit(refused);  // the parent has died already
  for (const int signal : {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGABRT, SIGTERM, SIGUSR1})
    std::signal(signal, SIG_DFL);
  const rlimit no_core{0, 0};
  setrlimit(RLIMIT_CORE, &no_core);
  limit_memory();
  dup2(open("/dev/null", O_WRONLY), STDERR_FILENO);  // discards messages of the C library
  try {
    read_file(path, whole);
  } catch (const std::exception& exception) {
    write_all(error, exception.what());
    const auto* own = dynamic_cast<const Error*>(&exception);
    _exit(own != nullptr && own->code() == ExitCode::usage ? unusable : refused);
  }
  H5garbage_collect();
  malloc_trim(0);  // both walk the heap, which may be corrupted
  _exit(0);
}

/// All that is written to a pipe until its other end is closed.
std::string read_to_end(int pipe) {
  std::string text;
  char block[4096];
  for (ssize_t got = 0; (got = read(pipe, block, sizeof(block))) != 0;) {
    if (got > 0) text.append(block, got);
    if (got < 0 && errno != EINTR) break;
  }
  close(pipe);
  return text;
}

void read_in_child(const std::string& path, bool whole) {
  int ends[2];
  if (pipe2(ends, O_CLOEXEC) != 0)
    throw_runtime("cannot start a process to read '{}' in: {}", path, std::strerror(errno));
  const pid_t parent = getpid(), child = fork();
  if (child == 0) read_everything(parent, path, whole, ends[1]);
  const int reason = errno;
  close(ends[1]);
  const std::string error = read_to_end(ends[0]);
  if (child < 0)
    throw_runtime("cannot start a process to read '{}' in: {}", path, std::strerror(reason));
  int result = 0;
  while (waitpid(child, &result, 0) < 0)
    if (errno != EINTR)
      throw_runtime("cannot wait for the process that reads '{}': {}", path, std::strerror(errno));
  if (WIFEXITED(result) && WEXITSTATUS(result) == refused) throw_runtime("{}", error);
  if (WIFEXITED(result) && WEXITSTATUS(result) == unusable) throw_usage("{}", error);
  if (result != 0)  // a signal, or the exit code of a sanitizer
    throw_runtime("reading '{}' crashes HDF5 {} ({} {}): the file is damaged", path,
                  library_version(), WIFSIGNALED(result) ? "signal" : "exit code",
                  WIFSIGNALED(result) ? WTERMSIG(result) : WEXITSTATUS(result));
}

}  // namespace

void try_reading(const std::string& path) {
  using Identity = std::tuple<dev_t, ino_t, off_t, time_t, long>;
  static std::set<Identity> survived;
  struct stat status {};
  if (stat(path.c_str(), &status) != 0) return;
  const Identity identity{status.st_dev, status.st_ino, status.st_size, status.st_mtim.tv_sec,
                          status.st_mtim.tv_nsec};
  if (survived.contains(identity)) return;
  const bool whole = status.st_size <= max_bytes;
  runs_alone() ? read_file(path, whole) : read_in_child(path, whole);
  survived.insert(identity);
}

}  // namespace gyre::h5
