// SPDX-License-Identifier: Apache-2.0
#include "pagoda/kernels/bandwidth_probe.h"

#include <gtest/gtest.h>

#include "pagoda/base/aligned_buffer.h"
#include "pagoda/base/error.h"

namespace pagoda::kernels {
namespace {

TEST(BandwidthProbe, KeepsWhatItUpdatesAndWritesWhatItWrites) {
  constexpr std::size_t kCount = 128;
  AlignedBuffer buffers[5];
  for (AlignedBuffer& buffer : buffers) {
    buffer = AlignedBuffer(kCount * 4, 64);
    for (float& x : buffer.as<float>()) x = 7.0F;
  }
  const auto array = [&](int i) { return buffers[i].as<float>().data(); };
  auto* written = buffers[4].as<Bf16>().data();
  const BandwidthProbe probe({{array(0)}, {array(1), array(2), array(3)}, {written}});
  for (const Isa isa : supported_isas()) {
    for (const bool stream : {false, true}) {
      for (std::size_t i = 0; i < kCount; ++i) written[i].bits = 1;
      probe.run(32, 96, {true, stream}, isa);
      for (std::size_t i = 0; i < kCount; ++i) {
        EXPECT_EQ(array(2)[i], 7.0F);
        EXPECT_EQ(written[i].bits, i >= 32 && i < 96 ? 0 : 1) << i;
      }
    }
  }
}

TEST(BandwidthProbe, RefusesStreamsThatNoKernelHas) {
  AlignedBuffer buffer(128, 64);
  auto* array = buffer.as<float>().data();
  EXPECT_THROW(BandwidthProbe({{array, array}, {}, {}}), UserError);
}

}  // namespace
}  // namespace pagoda::kernels
