#pragma once
// Which NCCL a program runs with. Built where NCCL is.

#include <string>

namespace gyre {

/// "2.28.3", of the library that is loaded, or "software GPU".
std::string nccl_version();

}  // namespace gyre
