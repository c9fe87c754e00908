#pragma once
// Expecting usage errors by their whole message.

#include <gtest/gtest.h>

#include <functional>
#include <string>

#include "core/error.hpp"

namespace gyre::test {

/// The message of the usage error that `work` throws, or "no error".
inline std::string usage_message(const std::function<void()>& work) {
  try {
    work();
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ExitCode::usage);
    return error.what();
  }
  return "no error";
}

/// Expects the usage error with this message.
inline void expect_usage(const std::string& message, const std::function<void()>& work) {
  EXPECT_EQ(usage_message(work), message);
}

}  // namespace gyre::test
