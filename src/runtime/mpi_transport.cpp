#include "runtime/mpi_transport.hpp"

#include <dlfcn.h>
#include <mpi.h>

#include <cstdio>
#include <cstdlib>
#include <memory>
#include <regex>
#include <sstream>

#include "runtime/shim/mpi_shim.h"

namespace gyre {
namespace {

/// The function of a library that this program has loaded, or null.
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

void join(std::string& kinds, const std::string& kind) {
  if (("+" + kinds + "+").find("+" + kind + "+") != std::string::npos) return;
  kinds += (kinds.empty() ? "" : "+") + kind;
}

}  // namespace

std::string mpich_device(const std::string& version_text) {
  static const std::regex line("MPICH Device:\\s*(\\S+)");
  std::smatch found;
  return std::regex_search(version_text, found, line) ? found[1].str() : "";
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
  static const std::regex lane(R"(lane\[\d+\]:\s*\d+:(\S+?)\.\d+\s.*->\s*\S+(.*))");
  UcxLanes lanes;
  std::string pieces;
  std::istringstream lines(endpoint_info);
  for (std::string line; std::getline(lines, line);) {
    std::smatch found;
    if (!std::regex_search(line, found, lane)) continue;
    const std::string transport = found[1];
    std::istringstream uses(found[2]);
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
