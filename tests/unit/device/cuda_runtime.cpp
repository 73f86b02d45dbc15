// SPDX-License-Identifier: Apache-2.0
// What must hold on a machine without a GPU; cuda.cpp is for one with.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "pagoda/base/error.h"
#include "pagoda/device/cuda/cuda_device.h"

namespace pagoda::device {
namespace {

TEST(CudaRuntime, AbsenceIsAReasonNotACrash) {
  std::string why;
  if (cuda::available(&why)) GTEST_SKIP() << "there is a GPU here";
  EXPECT_FALSE(why.empty());
  EXPECT_EQ(cuda::device_count(), 0);
  try {
    cuda::make_device();
    FAIL() << "a device out of nothing";
  } catch (const UserError& error) {
    EXPECT_THAT(error.message(), ::testing::HasSubstr("CUDA is not available: " + why));
  }
}

}  // namespace
}  // namespace pagoda::device
