#include "runtime/mpi_transport.hpp"

#include <dlfcn.h>
#include <mpi.h>
#include <regex.h>

#include <cstdio>
#include <cstdlib>
#include <memory>
#include <sstream>
#include <vector>

#include "runtime/shim/mpi_shim.h"

namespace gyre {
namespace {

/// Function of a library that this program has loaded; null if missing.
template <class Function>
Function* loaded(const char* name) {
  return reinterpret_cast<Function*>(dlsym(RTLD_DEFAULT, name));
}

std::string endpoint_info(void* endpoint) {
  auto* const print_info = loaded<void(void*, std::FILE*)>("ucp_ep_print_info");
  char* text = nullptr;
  size_t size = 0;
  std::FILE* const stream = print_info == nullptr ? nullptr : open_memstream(&text, &size);
  if (stream == nullptr) return "";
  print_info(endpoint, stream);
  std::fclose(stream);
  const std::unique_ptr<char, void (*)(void*)> owner(text, std::free);
  return {text, size};
}

/// POSIX extended regular expression; std::regex would take seconds to compile.
class Pattern {
 public:
  explicit Pattern(const char* text) { compiled_ = regcomp(&expression_, text, REG_EXTENDED) == 0; }
  ~Pattern() {
    if (compiled_) regfree(&expression_);
  }
  Pattern(const Pattern&) = delete;
  Pattern& operator=(const Pattern&) = delete;

  /// Texts of the groups in the first match; empty if there is no match.
  std::vector<std::string> groups(const std::string& text) const {
    std::vector<regmatch_t> found(expression_.re_nsub + 1);
    if (!compiled_ || regexec(&expression_, text.c_str(), found.size(), found.data(), 0) != 0)
      return {};
    std::vector<std::string> groups;
    for (size_t i = 1; i < found.size(); ++i)
      groups.emplace_back(text, static_cast<size_t>(found[i].rm_so),
                          static_cast<size_t>(found[i].rm_eo - found[i].rm_so));
    return groups;
  }

 private:
  regex_t expression_ = {};
  bool compiled_ = false;
};

void join(std::string& kinds, const std::string& kind) {
  if (("+" + kinds + "+").find("+" + kind + "+") != std::string::npos) return;
  kinds += (kinds.empty() ? "" : "+") + kind;
}

}  // namespace

std::string mpich_device(const std::string& version_text) {
  static const Pattern line("MPICH Device:[[:space:]]*([^[:space:]]+)");
  const std::vector<std::string> found = line.groups(version_text);
  return found.empty() ? "" : found[0];
}

std::string mpich_device() {
  char text[MPI_MAX_LIBRARY_VERSION_STRING] = {};
  int length = 0;
  MPI_Get_library_version(text, &length);
  return mpich_device(text);
}

std::string transport_version() {
  auto* const version = loaded<void(unsigned*, unsigned*, unsigned*)>("ucp_get_version");
  if (version == nullptr || gyre_ucx_endpoints(nullptr) == 0) return "";
  unsigned major = 0, minor = 0, release = 0;
  version(&major, &minor, &release);
  std::ostringstream text;
  text << "UCX " << major << '.' << minor << '.' << release;
  return text.str();
}

UcxLanes parse_lanes(const std::string& endpoint_info) {
  static const Pattern lane(
      R"(lane\[[0-9]+\]:[[:space:]]*[0-9]+:([^[:space:]]+)\.[0-9]+[[:space:]].*->)"
      R"([[:space:]]*[^[:space:]]+(.*))");
  UcxLanes lanes;
  std::string pieces;
  std::istringstream lines(endpoint_info);
  for (std::string line; std::getline(lines, line);) {
    const std::vector<std::string> found = lane.groups(line);
    if (found.empty()) continue;
    const std::string& transport = found[0];
    std::istringstream uses(found[1]);
    for (std::string use; uses >> use;) {
      if (use == "am") join(lanes.small, transport);
      if (use.rfind("rma_bw", 0) == 0) join(lanes.large, transport);
      if (use.rfind("am_bw", 0) == 0) join(pieces, transport);
    }
  }
  if (lanes.large.empty()) lanes.large = pieces;
  return lanes;
}

UcxLanes lanes_to(int rank, int world_size) {
  void* const* endpoints = nullptr;
  if (gyre_ucx_endpoints(&endpoints) != world_size) return {};
  return parse_lanes(endpoint_info(endpoints[rank]));
}

}  // namespace gyre
