#pragma once
// Version of the NCCL library that is loaded.

#include <string>

namespace gyre {

/// "2.28.3" for the loaded library, or "software GPU"; "no" in a build without NCCL.
std::string nccl_version();

}  // namespace gyre
