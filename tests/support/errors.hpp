#pragma once
// Expectations of usage errors with their whole message.

#include <gtest/gtest.h>

#include <functional>
#include <string>

#include "comm/agree.hpp"
#include "core/error.hpp"
#include "mpi_test.hpp"

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

/// The message of the agreed usage error that `work` throws, the same on all ranks, or "no error".
/// Collective.
inline std::string agreed_message(const std::function<void()>& work) {
  std::string message = "no error";
  try {
    work();
  } catch (const Error& error) {
    message = error.what();
    EXPECT_EQ(error.code(), ExitCode::usage);
    EXPECT_TRUE(error.agreed());
  }
  EXPECT_EQ(broadcast_string(world(), message, 0), message);
  return message;
}

}  // namespace gyre::test
