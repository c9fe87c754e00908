#pragma once
// Which NCCL a program runs with.

#include <string>

namespace gyre {

/// "2.28.3", of the library that is loaded, or "software GPU"; "no" in a build without NCCL.
std::string nccl_version();

}  // namespace gyre
