#pragma once
// Runs a check on every instruction set that this processor has and Highway generated code for.

#include <gtest/gtest.h>
#include <hwy/targets.h>

namespace gyre::test {

template <class Body>
void on_every_simd_target(Body body) {
  for (const int64_t target : hwy::SupportedAndGeneratedTargets()) {
    SCOPED_TRACE(hwy::TargetName(target));
    hwy::SetSupportedTargetsForTest(target);
    body();
    hwy::SetSupportedTargetsForTest(0);
  }
}

}  // namespace gyre::test
