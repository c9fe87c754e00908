#pragma once
// Version of the NCCL library that is loaded.

#include <string>

namespace gyre {

/// Such as "2.28.3"; "software GPU" if that stands in for NCCL; "no" in a build without NCCL.
std::string nccl_version();

}  // namespace gyre
