#include "runtime/profile_range.hpp"

#if !defined(GYRE_SOFTGPU) && __has_include(<nvtx3/nvtx3.hpp>)
#include <nvtx3/nvtx3.hpp>

namespace gyre {
namespace {

struct NvtxDomain {
  static constexpr char const* name{"gyre"};
};
nvtxDomainHandle_t domain() {
  return nvtx3::domain::get<NvtxDomain>();
}

}  // namespace

ProfileRange::ProfileRange(const char* name) {
  nvtxDomainRangePushEx(domain(), nvtx3::event_attributes(name).get());
}
ProfileRange::~ProfileRange() {
  nvtxDomainRangePop(domain());
}

}  // namespace gyre

#else

namespace gyre {

ProfileRange::ProfileRange(const char* /*name*/) {}
ProfileRange::~ProfileRange() {}

}  // namespace gyre

#endif
